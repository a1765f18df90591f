#include "tests/backend/transport/nccl/simulator/reductions.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace farandole::testing {
namespace {

template <typename T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value load(Stored stored) { return stored; }
  static Stored store(Value value) { return value; }
};

struct Half {
  using Stored = std::uint16_t;
  using Value = float;
  static Value load(Stored stored) { return halfToFloat(stored); }
  static Stored store(Value value) { return halfFromFloat(value); }
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  using Value = float;
  static Value load(Stored stored) { return bfloat16ToFloat(stored); }
  static Stored store(Value value) { return bfloat16FromFloat(value); }
};

template <typename T>
T product(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  return a * b;
}

template <typename T>
T sum(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  return a + b;
}

template <typename T>
T combined(ncclRedOp_t kind, T a, T b) {
  switch (kind) {
    case ncclProd: return product(a, b);
    case ncclMax: return std::max(a, b);
    case ncclMin: return std::min(a, b);
    default: return sum(a, b);
  }
}

template <typename Format>
Bytes reduceAs(const std::vector<Bytes>& parts, const std::vector<Operator>& operators) {
  using Stored = typename Format::Stored;
  using Value = typename Format::Value;
  const auto at = [](const void* from, std::size_t index) {
    Stored stored;
    std::memcpy(&stored, static_cast<const std::byte*>(from) + index * sizeof(Stored), sizeof(Stored));
    return Format::load(stored);
  };
  const auto element = [&](std::size_t rank, std::size_t index) {
    const Value value = at(parts[rank].data(), index);
    const Operator& op = operators[rank];
    if (op.scalar != nullptr) return product(value, at(op.scalar->data(), 0));
    if (op.deviceScalar != nullptr) return product(value, at(op.deviceScalar, 0));
    return value;
  };
  Bytes result(parts[0].size());
  for (std::size_t i = 0; i < result.size() / sizeof(Stored); ++i) {
    Value value = element(0, i);
    for (std::size_t rank = 1; rank < parts.size(); ++rank) {
      value = combined(operators[0].kind, value, element(rank, i));
    }
    if (operators[0].kind == ncclAvg) value = static_cast<Value>(value / static_cast<Value>(parts.size()));
    const Stored stored = Format::store(value);
    std::memcpy(result.data() + i * sizeof(Stored), &stored, sizeof(Stored));
  }
  return result;
}

}  // namespace

std::size_t elementSize(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 0;
  }
}

Bytes reduce(const std::vector<Bytes>& parts, const std::vector<Operator>& operators, ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8: return reduceAs<Plain<std::int8_t>>(parts, operators);
    case ncclUint8: return reduceAs<Plain<std::uint8_t>>(parts, operators);
    case ncclInt32: return reduceAs<Plain<std::int32_t>>(parts, operators);
    case ncclUint32: return reduceAs<Plain<std::uint32_t>>(parts, operators);
    case ncclInt64: return reduceAs<Plain<std::int64_t>>(parts, operators);
    case ncclUint64: return reduceAs<Plain<std::uint64_t>>(parts, operators);
    case ncclFloat16: return reduceAs<Half>(parts, operators);
    case ncclBfloat16: return reduceAs<Bfloat16>(parts, operators);
    case ncclFloat32: return reduceAs<Plain<float>>(parts, operators);
    case ncclFloat64: return reduceAs<Plain<double>>(parts, operators);
    default: return parts[0];
  }
}

float halfToFloat(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  float value;
  if (exponent == 31) {
    value = mantissa == 0 ? INFINITY : NAN;
  } else {
    value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                          : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

std::uint16_t halfFromFloat(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000;
  std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);  // 65520 and more: infinite
  if (magnitude < 0x38800000) {                                                   // below 2^-14: in steps of 2^-24
    const auto steps = static_cast<std::uint32_t>(std::lrint(std::ldexp(std::bit_cast<float>(magnitude), 24)));
    return static_cast<std::uint16_t>(sign | steps);
  }
  magnitude += 0xfff + (magnitude >> 13 & 1);  // to the nearest, ties to even
  return static_cast<std::uint16_t>(sign | (magnitude - 0x38000000) >> 13);
}

float bfloat16ToFloat(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t bfloat16FromFloat(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace farandole::testing
