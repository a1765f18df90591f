#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "pipeline/runtime/stage.h"

namespace farandole::pipeline {

// what() of the exception that is being caught.
std::string describeCurrentError();

// A warning of torch's.
void warn(const std::string& text);

struct ExecutorConfig {
  std::vector<StageSpec> stages;  // this rank's, ascending
  // Where the stages are, with all that they get and return.
  at::Device device{at::kCPU};
  // Sends and receives what is there; null on the CPU. Headers, packets, votes and, in steps that learn shapes,
  // tensors, too, go over the executor's own backend, between the hosts' memories.
  c10::intrusive_ptr<c10d::Backend> deviceBackend;
  // Whether what a rank has posted there starts in that order, one batch after another.
  bool hasOneQueue = false;
  double lossScale = 1;     // the gradient of each microbatch's loss, in a step that is given no other
  std::string description;  // of what is run: shown when ranks run different things
  std::string rankName;     // in errors; by default "rank N", of the plan

  // What is declared holds from the first step on, so that none learns shapes unless one has failed: each stage has at
  // most one before and one after it and declares what passes between them. Of what is floating-point gradients flow.
  bool areShapesDeclared = false;
  std::uint64_t alike = 0;  // what, beside the plan, must be the same on all ranks

  // A loss, or a gradient that goes to the stage before, that is NaN or infinite fails its stage.
  bool checksForNan = false;

  // Called inside a catch block: says what was thrown.
  std::function<std::string()> describeError = describeCurrentError;

  // Told once what the user should know of a stage. May throw, which fails the stage.
  std::function<void(const std::string&)> notify = warn;
};

}  // namespace farandole::pipeline
