#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/runtime/device_times.h"
#include "pipeline/runtime/edge_sizes.h"
#include "pipeline/runtime/executor_config.h"
#include "pipeline/runtime/program.h"
#include "pipeline/runtime/stage.h"
#include "pipeline/runtime/stage_compute.h"
#include "pipeline/runtime/stage_traffic.h"
#include "pipeline/runtime/step_agreement.h"
#include "pipeline/runtime/step_failure.h"

namespace farandole::pipeline {

// When an action of the last step ran, in seconds since the step began. Of a
// compute action only the computation counts, not the wait for its tensors. On a
// device that works behind the host's back: when the host launched it.
struct TimedInstruction {
  std::uint32_t instruction = 0;  // of Program::instructions
  double start = 0, end = 0;
};

struct StepTrace {
  std::vector<TimedInstruction> instructions;
  double seconds = 0;         // of the whole step
  double computeSeconds = 0;  // of its forwards and backwards
};

// Replays a program. Owned by one schedule; step() belongs to one thread and is
// called without the GIL.
//
// Failures. When a stage's forward, loss or backward throws, the rank finishes
// the program in failed mode: it computes no more, but still receives all that
// is sent to it, and sends zeros of the known shapes (in a step that learns
// shapes: a poisoned header, after which nothing flows on that edge, either
// way). So every message of the step finds its match, and nobody hangs. At the
// end of every step one small all-reduce tells all ranks whether any failed;
// if so, they exchange texts, all of them return the same error, and the next
// step learns shapes anew. Gradients of a failed step are undefined. What the
// transport itself throws is final: the executor refuses to run again.
//
// Replicas wait for each other within a step, in the reduction of gradients. A
// rank that will not get there abandons it as soon as it knows, not at the end of
// the step: that end may wait for a stage that waits for its replica.
class Executor {
 public:
  // `backend` reaches the ranks of the plan; null when there is one rank.
  static Result<std::unique_ptr<Executor>> create(const Plan& lowered, int rank,
                                                  const c10::intrusive_ptr<c10d::Backend>& backend,
                                                  ExecutorConfig config);

  // Runs one step on all ranks. `relearn` when inputs changed their shapes here. `lossScales`: the gradient of each
  // microbatch's loss; none for the config's. `isCaptured`: in a graph of the device, on all ranks; not before a step
  // that learned nothing has run outside of one.
  Status step(bool relearn, std::span<const double> lossScales = {}, bool isCaptured = false);

  // Takes part in the step's beginning only, to say that this rank cannot run
  // it; all ranks then return the reason.
  Status refuse(std::string reason);

  // Takes part in a step's beginning only: an error where any rank refuses, before this one begins anything that
  // others are to take part in. All ranks call it before their step, or none.
  Status confirm();

  // Whether further steps note when the device begins and ends each action: two events for each. On the CPU there is
  // nothing to note, nor is there in a captured step.
  void timeOnDevice(bool isTimed) { timesDevice_ = isTimed; }

  // Lets go of the receive buffers that are kept from step to step.
  void releaseBuffers() { traffic_.releaseBuffers(); }

  // As the steps so far have learned them.
  std::vector<EdgeSizes> edgeSizes() { return pipeline::edgeSizes(stages_); }

  const Program& program() const { return program_; }
  const StepTrace& lastTrace() const { return trace_; }

  // The last step as the device ran it, with the same instructions: from where the first began to where the last ended.
  // None where that was not noted. Waits for the device.
  std::optional<StepTrace> lastDeviceTrace();

 private:
  Executor(Program program, const c10::intrusive_ptr<c10d::Backend>& backend, ExecutorConfig config);

  Status voteOnly(const StepAgreement::Vote& vote);
  // What is kept from step to step.
  void releaseKept();
  Status runStep(bool relearn, std::span<const double> lossScales);
  Status replay();
  Status agree();
  Status conclude();
  Status forward(const Instruction& instruction, TimedInstruction& time);
  Status transportBroke(const std::string& during);
  void begin(TimedInstruction& time);
  void markEnd();
  double now() const;

  Program program_;
  ExecutorConfig config_;
  std::vector<Stage> stages_;
  StepAgreement agreement_;
  StageTraffic traffic_;
  StepFailure failure_;
  StageCompute compute_;
  StepTrace trace_;
  DeviceTimes deviceTimes_;  // of the start and the end of each instruction of the trace
  std::chrono::steady_clock::time_point began_;
  bool learned_ = false;         // shapes are known on all ranks
  bool learning_ = false;        // in this step
  bool agreed_ = false;          // the vote of this step is over
  bool isCaptured_ = false;      // this step
  bool timesDevice_ = false;     // from the next step on
  bool isDeviceTimed_ = false;   // the last step
  bool hasRunSteadily_ = false;  // a step that learned nothing, since shapes were learned last: all edges are connected
  Status broken_;
};

}  // namespace farandole::pipeline
