#pragma once

#include <array>
#include <optional>
#include <vector>

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// One microbatch's way through a V of stages, two on each of p ranks, that can be repeated every six units of time,
// each of which is an F, an I or a W, without two things at a time on any rank (Qi et al., "Pipeline Parallelism with
// Controllable Memory", 2024). How long it takes is how many microbatches are on their way at a time, and so the
// memory.
class BuildingBlock {
 public:
  // Units from one rank to the next: forwards down the V and up again, gradients down and up.
  struct Pace {
    std::int32_t forwardDown;
    std::int32_t forwardUp;
    std::int32_t backwardDown;
    std::int32_t backwardUp;
  };
  // The shortest one of that pace, and of those the one with which ranks hold least; none if there is none.
  static std::optional<BuildingBlock> make(const Pace& pace, std::int32_t numRanks);

  struct Slot {
    std::int32_t time;
    ActionKind kind;
    int chunk;  // 0: down the V
  };
  std::vector<Slot> slotsOf(std::int32_t rank) const;

  static constexpr std::int32_t kPeriod = 6;

 private:
  // How long it rests at the three turns: on the last rank, on the first one, and on the last one again.
  BuildingBlock(const Pace& pace, std::int32_t numRanks, const std::array<std::int32_t, 3>& rests);
  // Of F and I of both chunks, in the order of a microbatch's way.
  std::array<std::int32_t, 4> timesOf(std::int32_t rank) const;
  bool canRepeat() const;
  // Activations on the rank that holds most, where it is repeated without end.
  std::int32_t mostHeld() const;

  Pace pace_;
  std::int32_t numRanks_;
  // On rank 0.
  std::int32_t lastForward_;
  std::int32_t firstBackward_;
  std::int32_t lastBackward_;
};

// All ranks do what the block says, one microbatch six units after the other.
Plan repeat(const BuildingBlock& block, const ScheduleOptions& options);

}  // namespace farandole::pipeline
