#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// One line per rank, actions between commas: the files that torch's schedules
// write with _dump_csv and read with _load_csv, in both of its formats.
//
// A plan whose graph of stages is given, or whose stages do not run all
// microbatches, has one or both of these lines behind those of the ranks:
//   edges,0>1,0>3,1>3        each from a stage to another one
//   microbatches,0:4,4:8     of each stage: the first, and the one after the last
// torch has no such plans, and refuses to read the lines.
std::string toCsv(const Plan& plan);

// Reads such a file. Blank cells are torch's idle slots and are dropped; the
// number of microbatches is the highest that an action names plus one. `rankOfStage` places
// the stages. Errors name line and column, both from 1. Whether the plan can
// run is validate()'s question.
Result<Plan> fromCsv(std::string_view text, std::vector<std::int32_t> rankOfStage);

// The same, placing each stage on the rank that computes it.
Result<Plan> fromCsv(std::string_view text);

}  // namespace farandole::pipeline
