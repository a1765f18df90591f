#pragma once

#include <functional>
#include <string>
#include <vector>

#include "pipeline/runtime/stage.h"

namespace farandole::pipeline {

// what() of the exception that is being caught.
std::string describeCurrentError();

// A warning of torch's.
void warn(const std::string& text);

struct ExecutorConfig {
  std::vector<StageSpec> stages;  // this rank's, ascending
  double lossScale = 1;           // the gradient of each microbatch's loss, in a step that is given no other
  std::string description;        // of what is run: shown when ranks run different things
  std::string rankName;           // in errors; by default "rank N", of the plan

  // Called inside a catch block: says what was thrown.
  std::function<std::string()> describeError = describeCurrentError;

  // Told once what the user should know of a stage. May throw, which fails the stage.
  std::function<void(const std::string&)> notify = warn;
};

}  // namespace farandole::pipeline
