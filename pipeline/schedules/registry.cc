#include "pipeline/schedules/registry.h"

#include <algorithm>
#include <string>

#include "pipeline/schedules/controllable_memory.h"
#include "pipeline/schedules/dual_pipe.h"
#include "pipeline/schedules/dual_pipe_v.h"
#include "pipeline/schedules/gpipe.h"
#include "pipeline/schedules/interleaved.h"
#include "pipeline/schedules/none.h"
#include "pipeline/schedules/one_f_one_b.h"
#include "pipeline/schedules/zbv.h"
#include "pipeline/schedules/zero_bubble.h"

namespace farandole::pipeline {
namespace {

struct Entry {
  std::string_view name;
  ScheduleGenerator make;
};

constexpr Entry kSchedules[] = {
    {"none", makeNone},
    {"GPipe", makeGPipe},
    {"1F1B", makeOneFOneB},
    {"Interleaved1F1B", makeInterleavedOneFOneB},
    {"LoopedBFS", makeLoopedBfs},
    {"ZB-H1", makeZbH1},
    {"ZB-H2", makeZbH2},
    {"InterleavedZeroBubble", makeInterleavedZeroBubble},
    {"ZBV", makeZbv},
    {"V-Half", makeVHalf},
    {"V-Min", makeVMin},
    {"DualPipe", makeDualPipe},
    {"DualPipeV", makeDualPipeV},
};

char lowerCase(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool equalIgnoringCase(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return lowerCase(x) == lowerCase(y); });
}

}  // namespace

Result<Plan> makePlan(std::string_view name, const ScheduleOptions& options) {
  std::string known;
  for (const Entry& entry : kSchedules) {
    if (equalIgnoringCase(entry.name, name)) return entry.make(options);
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  return Status::invalidArgument("schedule name is '" + std::string(name) + "'; expected one of " + known);
}

std::vector<std::string_view> scheduleNames() {
  std::vector<std::string_view> names;
  for (const Entry& entry : kSchedules) names.push_back(entry.name);
  return names;
}

}  // namespace farandole::pipeline
