#pragma once

#include <functional>
#include <string>
#include <vector>

#include "pipeline/runtime/stage.h"

namespace farandole::pipeline {

struct ExecutorConfig {
  std::vector<StageSpec> stages;  // this rank's, ascending
  double lossScale = 1;           // the gradient of each microbatch's loss
  std::string description;        // of what is run: shown when ranks run different things
  std::string rankName;           // in errors; by default "rank N", of the plan

  // Called inside a catch block: says what was thrown. Default: what().
  std::function<std::string()> describeError;

  // Told once what the user should know of a stage. Default: a warning of torch's. May throw, which fails the stage.
  std::function<void(const std::string&)> notify;
};

}  // namespace farandole::pipeline
