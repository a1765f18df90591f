#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// One line per rank, actions between commas: the files that torch's schedules
// write with _dump_csv and read with _load_csv, in both of its formats. Edges
// and what each stage runs are not in it: a plan that is read is a chain's.
std::string toCsv(const Plan& plan);

// Reads such a file. Blank cells are torch's idle slots and are dropped; the
// number of microbatches is the highest named plus one. `rankOfStage` places
// the stages. Errors name line and column, both from 1. Whether the plan can
// run is validate()'s question.
Result<Plan> fromCsv(std::string_view text, std::vector<std::int32_t> rankOfStage);

// The same, placing each stage on the rank that computes it.
Result<Plan> fromCsv(std::string_view text);

}  // namespace farandole::pipeline
