#include "pipeline/train/schedule_config.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "backend/common/settings.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/stage_graph.h"
#include "pipeline/ir/validate.h"
#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"

namespace farandole::pipeline {

namespace {

Result<Plan> computePlan(const ScheduleConfig& config, bool forwardOnly) {
  if (config.plan) return forwardOnly ? forwardsOf(*config.plan) : *config.plan;
  ScheduleOptions options;
  options.numRanks = config.numRanks();
  options.numStages = config.numStages == 0 ? config.numRanks() : config.numStages;
  options.numMicrobatches = config.numMicrobatches;
  options.forwardOnly = forwardOnly;
  options.warmupPerStage = config.warmupPerStage;
  options.microbatchGroup = config.microbatchGroup;
  options.edges = config.edges;
  return makePlan(config.name, options);
}

std::string listed(const std::vector<std::int32_t>& stages) {
  std::string text;
  for (const std::int32_t stage : stages) text += (text.empty() ? "" : ", ") + std::to_string(stage);
  return text.empty() ? "none" : text;
}

std::vector<std::int32_t> stagesOn(int rank, const Plan& plan) {
  std::vector<std::int32_t> stages;
  for (std::int32_t stage = 0; stage < plan.numStages; ++stage) {
    if (plan.rankOfStage[stage] == rank) stages.push_back(stage);
  }
  return stages;
}

Status checkPlacement(const ScheduleConfig& config, const Plan& plan) {
  if (plan.numRanks() != config.numRanks()) {
    return Status::invalidArgument("the plan has " + std::to_string(plan.numRanks()) + " ranks, expected " +
                                   std::to_string(config.numRanks()) + " as the backend has");
  }
  std::vector<std::int32_t> given;
  for (const ModuleStage& stage : config.stages) given.push_back(stage.index);
  std::ranges::sort(given);
  const std::vector<std::int32_t> expected = stagesOn(config.rank(), plan);
  if (given == expected) return Status::ok();
  return Status::invalidArgument("stages is " + listed(given) + " (by index), expected " + listed(expected) +
                                 ", which the plan runs on rank " + std::to_string(config.rank()));
}

bool isFarandole(const c10d::Backend& backend) { return backend.getBackendName() == "farandole"; }

bool isOverUcx(const ScheduleConfig& config) {
  return config.deviceBackend && isFarandole(*config.deviceBackend) && textSetting("FARANDOLE_CUDA_MESSAGES") == "ucx";
}

// On a device a host may wait for all that this was given, messages that wait for their peers included: with one queue
// none waits for what its own rank does later.
ChannelModel channelOf(const ScheduleConfig& config) {
  return config.device.is_cpu() || isOverUcx(config) ? ChannelModel::kTagged : ChannelModel::kOneQueuePerRank;
}

Status checkDevice(const ScheduleConfig& config) {
  if (!config.device.is_cpu() && !config.device.is_cuda()) {
    return Status::invalidArgument("device is " + config.device.str() +
                                   ", expected cpu or cuda: other devices are not supported yet");
  }
  if (config.device.is_cpu()) return Status::ok();
  if (config.numRanks() > 1 && !config.deviceBackend) {
    return Status::invalidArgument("deviceBackend is null, expected one that sends tensors on " + config.device.str());
  }
  const bool isThere = c10::impl::hasDeviceGuardImpl(config.device.type());
  const int count = isThere ? c10::impl::VirtualGuardImpl(config.device.type()).deviceCount() : 0;
  if (count > 0 && config.device.index() < count) return Status::ok();
  return Status::invalidArgument("device is " + config.device.str() + ", expected one of the " + std::to_string(count) +
                                 " GPUs that torch finds");
}

Status checkStages(const ScheduleConfig& config, const Plan& plan) {
  const Result<StageGraph> graph = StageGraph::make(plan);
  if (!graph) return graph.status();
  for (const ModuleStage& stage : config.stages) {
    FARANDOLE_RETURN_IF_ERROR(stage.check(deviceOf(config)).wrapUnlessOk("stage " + std::to_string(stage.index)));
    for (const auto& [to, outputs] : stage.outputsTo) {
      if (to >= 0 && to < plan.numStages && graph->find(stage.index, to) != StageGraph::kNoEdge) continue;
      return Status::invalidArgument("stage " + std::to_string(stage.index) + ": outputsTo names stage " +
                                     std::to_string(to) + ", expected one that an edge of the plan leads to");
    }
  }
  return Status::ok();
}

}  // namespace

Result<std::vector<std::int32_t>> stagesHere(const ScheduleConfig& config) {
  const Result<Plan> plan = computePlan(config, false);
  if (!plan) return plan.status();
  return stagesOn(config.rank(), *plan);
}

at::Device deviceOf(const ScheduleConfig& config) {
  if (config.device.is_cpu()) return at::kCPU;
  if (config.device.has_index()) return config.device;
  return c10::impl::VirtualGuardImpl(config.device.type()).getDevice();
}

bool hasOneQueue(const ScheduleConfig& config) {
  if (config.device.is_cpu() || !config.deviceBackend || isOverUcx(config)) return false;
  return !isFarandole(*config.deviceBackend) || textSetting("CUDA_DEVICE_MAX_CONNECTIONS") == "1";
}

Result<Plan> planOf(const ScheduleConfig& config, bool forwardOnly) {
  if (Status fits = checkDevice(config); !fits.isOk()) return fits;
  Result<Plan> plan = computePlan(config, forwardOnly);
  if (plan && hasCommunication(*plan)) {
    if (Status proven = validate(*plan, channelOf(config)); !proven.isOk()) return proven;
  } else if (plan) {
    plan = lower(*plan, channelOf(config));
  }
  if (!plan) return plan;
  if (Status fits = checkPlacement(config, *plan); !fits.isOk()) return fits;
  if (Status fits = checkStages(config, *plan); !fits.isOk()) return fits;
  return plan;
}

}  // namespace farandole::pipeline
