#pragma once

#include <string>

namespace example {

struct Options {
  std::string schedule = "1F1B";
  int stages = 0;  // 0: as few as the schedule takes
  int microbatches = 8;
  int steps = 30;
  double tolerance = 1e-9;
};

// Of the command line; throws what is wrong with it.
Options parseOptions(int argc, char** argv);

}  // namespace example
