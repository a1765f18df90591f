#include "pipeline/schedules/squeeze.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace farandole::pipeline {
namespace {

// What a rank does for each microbatch, in the order of BuildingBlock::slotsOf().
constexpr std::size_t kFirstForward = 0, kSecondForward = 1, kSecondInput = 2, kFirstInput = 3, kSecondWeight = 4;
constexpr std::size_t kNumParts = 6;

constexpr bool isForward(std::size_t part) { return part <= kSecondForward; }
constexpr bool isWeight(std::size_t part) { return part >= kSecondWeight; }

// Microbatches that a forward ahead of its turn leaves room for, of each of a rank's two stages.
struct Room {
  std::int32_t first = 0;
  std::int32_t second = 0;
};
constexpr Room kInTurn{std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::max()};
constexpr std::array<Room, 9> kRooms{{kInTurn, {0, 0}, {1, 0}, {2, 0}, {3, 0}, {0, 1}, {1, 1}, {2, 1}, {3, 1}}};

// One run of all ranks, in steps of the time that an action takes.
class Run {
 public:
  Run(const std::vector<std::vector<BuildingBlock::Slot>>& slots, std::int32_t numMicrobatches, std::int32_t limit,
      const Room& room)
      : slots_(slots), numMicrobatches_(numMicrobatches), limit_(limit), room_(room), ranks_(slots.size()) {}

  // None where ranks wait for ever.
  std::optional<std::int32_t> length() {
    std::size_t left = slots_.size() * kNumParts * static_cast<std::size_t>(numMicrobatches_);
    while (left > 0) {
      const std::size_t before = left;
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) left -= advance(rank) ? 1 : 0;
      if (left == before) return std::nullopt;
      for (Rank& rank : ranks_) rank.ended = rank.begun;
      ++time_;
    }
    return time_;
  }

  // What each rank did: (part, microbatch).
  using Order = std::vector<std::pair<std::size_t, std::int32_t>>;
  const Order& orderOf(std::size_t rank) const { return ranks_[rank].order; }

 private:
  struct Rank {
    std::array<std::int32_t, kNumParts> begun{}, ended{};  // how many of each
    std::int32_t held = 0;
    Order order;
  };

  bool advance(std::size_t rank) {
    const std::optional<std::size_t> part = choose(rank);
    if (!part) return false;
    Rank& own = ranks_[rank];
    own.order.emplace_back(*part, own.begun[*part]++);
    own.held += isForward(*part) ? 1 : isWeight(*part) ? -1 : 0;
    return true;
  }

  std::int32_t turnOf(std::size_t rank, std::size_t part) const {
    return slots_[rank][part].time + BuildingBlock::kPeriod * ranks_[rank].begun[part];
  }

  std::optional<std::size_t> choose(std::size_t rank) const {
    const Rank& own = ranks_[rank];
    std::optional<std::size_t> inTurn, chosen, weight;
    for (std::size_t part = 0; part < kNumParts; ++part) {
      if (own.begun[part] == numMicrobatches_) continue;
      if (isWeight(part)) {
        const bool isReady = own.begun[part] < own.ended[part - 2];
        if (isReady && isBefore(rank, part, weight)) weight = part;
      } else if (isBefore(rank, part, inTurn)) {
        inTurn = part;
      }
    }
    for (std::size_t part = 0; part < kSecondWeight; ++part) {
      if (own.begun[part] == numMicrobatches_ || !isReady(rank, part)) continue;
      if (isForward(part) && own.held >= limitFor(part, part == inTurn)) continue;
      if (isBefore(rank, part, chosen)) chosen = part;
    }
    return chosen ? chosen : weight;
  }

  bool isBefore(std::size_t rank, std::size_t part, const std::optional<std::size_t>& other) const {
    return !other || turnOf(rank, part) < turnOf(rank, *other);
  }

  std::int32_t limitFor(std::size_t part, bool isInTurn) const {
    const std::int32_t room = part == kFirstForward ? room_.first : room_.second;
    if (isInTurn) return limit_;
    return room < limit_ ? limit_ - room : 0;
  }

  // Stages go down the ranks and come up again; so do forwards, and backwards the other way.
  bool isReady(std::size_t rank, std::size_t part) const {
    const bool goesDown = part == kFirstForward || part == kSecondInput;
    const bool isAtTurn = goesDown ? rank == 0 : rank + 1 == ranks_.size();
    if (isAtTurn && part == kFirstForward) return true;
    const std::size_t from = isAtTurn ? rank : goesDown ? rank - 1 : rank + 1;
    return ranks_[rank].begun[part] < ranks_[from].ended[isAtTurn ? part - 1 : part];
  }

  const std::vector<std::vector<BuildingBlock::Slot>>& slots_;
  const std::int32_t numMicrobatches_;
  const std::int32_t limit_;
  const Room room_;
  std::vector<Rank> ranks_;
  std::int32_t time_ = 0;
};

std::int32_t mostHeld(const Plan& plan) {
  std::int32_t most = 0;
  for (const std::vector<Action>& actions : plan.ranks) {
    std::int32_t held = 0;
    for (const Action& action : actions) {
      held += action.kind == ActionKind::kForward ? 1 : action.kind == ActionKind::kBackwardWeight ? -1 : 0;
      most = std::max(most, held);
    }
  }
  return most;
}

}  // namespace

Plan squeeze(const BuildingBlock& block, const ScheduleOptions& options) {
  Plan plan = repeat(block, options);
  const std::int32_t limit = mostHeld(plan);
  std::vector<std::vector<BuildingBlock::Slot>> slots;
  slots.reserve(static_cast<std::size_t>(options.numRanks));
  for (std::int32_t rank = 0; rank < options.numRanks; ++rank) slots.push_back(block.slotsOf(rank));
  std::optional<Run> best;
  std::int32_t shortest = std::numeric_limits<std::int32_t>::max();
  for (const Room& room : kRooms) {
    Run run(slots, options.numMicrobatches, limit, room);
    const std::optional<std::int32_t> length = run.length();
    if (!length || *length >= shortest) continue;
    shortest = *length;
    best.emplace(std::move(run));
  }
  if (!best) return plan;
  for (std::int32_t rank = 0; rank < options.numRanks; ++rank) {
    const std::array<std::int32_t, 2> stages{rank, options.numStages - 1 - rank};
    plan.ranks[rank].clear();
    for (const auto& [part, microbatch] : best->orderOf(rank)) {
      const BuildingBlock::Slot& slot = slots[rank][part];
      plan.ranks[rank].push_back({stages[slot.chunk], slot.kind, microbatch, {}});
    }
  }
  return plan;
}

}  // namespace farandole::pipeline
