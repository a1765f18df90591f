#include "pipeline/schedules/building_block.h"

#include <algorithm>
#include <set>
#include <utility>

#include "pipeline/schedules/placement.h"

namespace farandole::pipeline {
namespace {

std::int32_t remainder(std::int32_t time) { return time % BuildingBlock::kPeriod; }

// The first time after `time` that has this remainder.
std::int32_t firstAfter(std::int32_t time, std::int32_t wanted) {
  constexpr std::int32_t kPeriod = BuildingBlock::kPeriod;
  return time + 1 + (wanted - remainder(time + 1) + kPeriod) % kPeriod;
}

}  // namespace

BuildingBlock::BuildingBlock(const Pace& pace, std::int32_t numRanks, const std::array<std::int32_t, 3>& rests)
    : pace_(pace), numRanks_(numRanks) {
  const std::int32_t hops = numRanks - 1;
  lastForward_ = (pace.forwardDown + pace.forwardUp) * hops + rests[0];
  firstBackward_ = lastForward_ + rests[1];
  lastBackward_ = firstBackward_ + (pace.backwardDown + pace.backwardUp) * hops + rests[2];
}

std::array<std::int32_t, 4> BuildingBlock::timesOf(std::int32_t rank) const {
  return {pace_.forwardDown * rank, lastForward_ - pace_.forwardUp * rank, firstBackward_ + pace_.backwardDown * rank,
          lastBackward_ - pace_.backwardUp * rank};
}

bool BuildingBlock::canRepeat() const {
  for (std::int32_t rank = 0; rank < numRanks_; ++rank) {
    std::set<std::int32_t> taken;
    for (const std::int32_t time : timesOf(rank)) taken.insert(remainder(time));
    if (taken.size() < 4) return false;
  }
  return true;
}

std::optional<BuildingBlock> BuildingBlock::make(const Pace& pace, std::int32_t numRanks) {
  std::optional<BuildingBlock> best;
  // In the order of their sums, the shortest first.
  for (std::int32_t sum = 3; sum <= 3 * kPeriod && !best; ++sum) {
    for (std::int32_t first = 1; first <= kPeriod; ++first) {
      for (std::int32_t second = 1; second <= kPeriod; ++second) {
        const std::int32_t third = sum - first - second;
        if (third < 1 || third > kPeriod) continue;
        const BuildingBlock block(pace, numRanks, {first, second, third});
        if (block.canRepeat() && (!best || block.mostHeld() < best->mostHeld())) best = block;
      }
    }
  }
  return best;
}

std::int32_t BuildingBlock::mostHeld() const {
  const auto periods = [](std::int32_t time) {  // rounded down
    return time >= 0 ? time / kPeriod : -((kPeriod - 1 - time) / kPeriod);
  };
  std::int32_t most = 0;
  for (std::int32_t rank = 0; rank < numRanks_; ++rank) {
    const std::vector<Slot> slots = slotsOf(rank);
    for (std::int32_t now = 0; now < kPeriod; ++now) {
      std::int32_t held = 0;
      for (const auto& [forward, weight] : {std::pair(slots[0], slots[5]), std::pair(slots[1], slots[4])}) {
        held += periods(now - forward.time) - periods(now - weight.time - 1);
      }
      most = std::max(most, held);
    }
  }
  return most;
}

std::vector<BuildingBlock::Slot> BuildingBlock::slotsOf(std::int32_t rank) const {
  const std::array<std::int32_t, 4> times = timesOf(rank);
  const std::int32_t backward1 = times[2], backward0 = times[3];
  std::vector<std::int32_t> left;
  for (std::int32_t i = 0; i < kPeriod; ++i) {
    if (std::ranges::none_of(times, [&](std::int32_t time) { return remainder(time) == i; })) left.push_back(i);
  }
  // The two W take what is left, so that they come soon after their I.
  const auto wait = [&](std::int32_t first, std::int32_t second) {
    return firstAfter(backward1, first) - backward1 + firstAfter(backward0, second) - backward0;
  };
  if (wait(left[1], left[0]) < wait(left[0], left[1])) std::swap(left[0], left[1]);
  return {{times[0], ActionKind::kForward, 0},
          {times[1], ActionKind::kForward, 1},
          {backward1, ActionKind::kBackwardInput, 1},
          {backward0, ActionKind::kBackwardInput, 0},
          {firstAfter(backward1, left[0]), ActionKind::kBackwardWeight, 1},
          {firstAfter(backward0, left[1]), ActionKind::kBackwardWeight, 0}};
}

Plan repeat(const BuildingBlock& block, const ScheduleOptions& options) {
  Plan plan = makeVPlan(options);
  for (std::int32_t rank = 0; rank < options.numRanks; ++rank) {
    struct Timed {
      std::int32_t time;
      Action action;
    };
    std::vector<Timed> timed;
    const std::array<std::int32_t, 2> stages{rank, options.numStages - 1 - rank};
    for (const BuildingBlock::Slot& slot : block.slotsOf(rank)) {
      for (std::int32_t microbatch = 0; microbatch < options.numMicrobatches; ++microbatch) {
        timed.push_back(
            {slot.time + BuildingBlock::kPeriod * microbatch, {stages[slot.chunk], slot.kind, microbatch, {}}});
      }
    }
    std::ranges::sort(timed, {}, &Timed::time);
    for (Timed& one : timed) plan.ranks[rank].push_back(std::move(one.action));
  }
  return plan;
}

}  // namespace farandole::pipeline
