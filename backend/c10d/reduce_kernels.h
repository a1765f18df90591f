#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/collective/algorithms.h"

namespace farandole::backend {

// The reduction for a dtype; throws an error that names both where there is
// none. half, bfloat16 and the 8-bit kinds are accumulated in float (complex
// half in complex float) and rounded once; in a reduction of several steps, after
// each of them, where a sum beyond the dtype is lost. An average's steps are averages
// themselves, which are never beyond it. For PREMUL_SUM it is the sum.
collective::Reduction reductionFor(const ::c10d::ReduceOp& op, at::ScalarType dtype);

// Of its code: "SUM of Float".
std::string describeReduction(std::uint16_t code);

// What PREMUL_SUM multiplies this rank's input by; none for other operations.
std::optional<at::Scalar> premulFactor(const ::c10d::ReduceOp& op);

}  // namespace farandole::backend
