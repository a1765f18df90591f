#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"
#include "pipeline/train/loss.h"
#include "pipeline/train/module_stage.h"

namespace farandole::pipeline {

// What a pipeline runs: a schedule by its name, or a plan; and this rank's part in it.
struct ScheduleConfig {
  std::string name = "1F1B";   // one of scheduleNames(); docs/schedules.md says which stages it puts where
  std::int32_t numStages = 0;  // of the pipeline; 0: one on each rank
  std::int32_t numMicrobatches = 0;
  std::int32_t warmupPerStage = 1;                             // of 1F1B, see ScheduleOptions
  std::int32_t microbatchGroup = 0;                            // of interleaved schedules, see ScheduleOptions
  std::optional<std::vector<StageEdge>> edges = std::nullopt;  // none: each stage's outputs go to the next one

  // Instead of all of those: with or without communication, the same on all ranks.
  std::optional<Plan> plan = std::nullopt;

  c10::intrusive_ptr<c10d::Backend> backend = nullptr;  // of any kind that sends CPU tensors; none: a single rank

  // Where this rank's stages are, with all that they take and return: the CPU or a GPU of CUDA.
  at::Device device{at::kCPU};
  // Sends tensors there, as ProcessGroupNCCL does, or farandole's backend once more; none on the CPU or for one rank.
  c10::intrusive_ptr<c10d::Backend> deviceBackend = nullptr;

  std::vector<ModuleStage> stages = {};  // this rank's, in any order
  Loss loss = {};
  bool checkForNan = false;  // a loss, or a gradient for the stage before, that is NaN or infinite is all ranks' error
  bool scaleGrads = true;    // gradients are means over the microbatches, as their losses' mean has them; else sums

  std::int32_t rank() const { return backend ? backend->getRank() : 0; }
  std::int32_t numRanks() const { return backend ? backend->getSize() : 1; }
};

// The stages that the plan places on this rank: what `stages` is to hold.
Result<std::vector<std::int32_t>> stagesHere(const ScheduleConfig& config);

// The stages' device, with its index.
at::Device deviceOf(const ScheduleConfig& config);

// Whether the messages of `deviceBackend` start one batch after another: over ProcessGroupNCCL, which has one
// communicator for all, and where CUDA has one queue for all streams (CUDA_DEVICE_MAX_CONNECTIONS=1).
bool hasOneQueue(const ScheduleConfig& config);

// The plan of all ranks, with communication and proven, for those stages and ranks; of forwards alone where asked for.
Result<Plan> planOf(const ScheduleConfig& config, bool forwardOnly);

}  // namespace farandole::pipeline
