#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace farandole::testing {

using Bytes = std::vector<std::byte>;

// 0 for what is not simulated (fp8).
std::size_t elementSize(ncclDataType_t dtype);

// What a call reduces with, looked up when it is issued. A scalar: a pre-multiplied sum, by this rank's factor.
struct Operator {
  ncclRedOp_t kind = ncclSum;
  std::shared_ptr<const Bytes> scalar;
  const void* deviceScalar = nullptr;  // instead: read when the kernel runs

  bool preMultiplies() const { return scalar != nullptr || deviceScalar != nullptr; }
  bool matches(const Operator& other) const { return kind == other.kind && preMultiplies() == other.preMultiplies(); }
};

// Reduces `parts`, one for each rank with its operator, in their order: half and bfloat16 in float, rounded once.
Bytes reduce(const std::vector<Bytes>& parts, const std::vector<Operator>& operators, ncclDataType_t dtype);

float halfToFloat(std::uint16_t bits);
std::uint16_t halfFromFloat(float value);
float bfloat16ToFloat(std::uint16_t bits);
std::uint16_t bfloat16FromFloat(float value);

}  // namespace farandole::testing
