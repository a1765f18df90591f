#include "backend/c10d/reduce_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e4m3fnuz.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Float8_e5m2fnuz.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FARANDOLE_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FARANDOLE_VECTOR_CLONES
#endif

namespace farandole::backend {
namespace {

using ::c10d::ReduceOp;
using collective::AverageFunction;
using collective::ReduceFunction;

// Elements reduced at a time: sources and accumulator stay in the first-level cache.
constexpr std::size_t kBlock = 1024;

template <typename T>
constexpr bool kIsComplex = std::is_same_v<T, c10::complex<float>> || std::is_same_v<T, c10::complex<double>> ||
                            std::is_same_v<T, c10::complex<c10::Half>>;
template <typename T>
constexpr bool kIsByteFloat = std::is_same_v<T, c10::Float8_e4m3fn> || std::is_same_v<T, c10::Float8_e4m3fnuz> ||
                              std::is_same_v<T, c10::Float8_e5m2> || std::is_same_v<T, c10::Float8_e5m2fnuz>;
template <typename T>
constexpr bool kIsReduced = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16> || kIsByteFloat<T>;
template <typename T>
using Accumulator =
    std::conditional_t<kIsReduced<T>, float,
                       std::conditional_t<std::is_same_v<T, c10::complex<c10::Half>>, c10::complex<float>, T>>;

// Integers wrap around, as in torch, which C++ leaves undefined for signed ones, and for what it makes of short ones.
template <typename T>
using Wrapping = std::common_type_t<std::make_unsigned_t<T>, unsigned>;

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
      return a || b;
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return static_cast<T>(a + b);
    }
  }
};
struct Product {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
      return a && b;
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return static_cast<T>(a * b);
    }
  }
};
// As torch's amin and amax: a NaN on either side gives NaN.
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a < b || std::isnan(a) ? a : b;
    } else {
      return std::min(a, b);
    }
  }
};
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      return a > b || std::isnan(a) ? a : b;
    } else {
      return std::max(a, b);
    }
  }
};
struct And {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename A>
[[gnu::always_inline]] inline A divided(A sum, int numParts) {
  if constexpr (kIsComplex<A>) {
    return sum / static_cast<typename A::value_type>(numParts);
  } else if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(sum / numParts);  // as wide as numParts: that may be more than A holds
  } else {
    return sum / static_cast<A>(numParts);
  }
}

template <typename T, bool kAverage>
[[gnu::always_inline]] inline T finish(Accumulator<T> value, int numSources) {
  if constexpr (kAverage) value = divided(value, numSources);
  return static_cast<T>(value);
}

// One machine code for each kind of vectors, the best of which is chosen when it is
// loaded. The accumulator is for what comes between the first two sources and the
// last one. `ivdep`: the destination may be a source, never one that is shifted.
template <typename T, typename Op, bool kAverage>
FARANDOLE_VECTOR_CLONES void reduceBlocks(void* dst, const void* const* sources, int numSources, std::size_t count) {
  using A = Accumulator<T>;
  A accumulator[kBlock];
  const auto source = [&](int i) { return static_cast<const T*>(sources[i]); };
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t n = std::min(kBlock, count - first);
    T* const out = static_cast<T*>(dst) + first;
    const T* const a = source(0) + first;
    if (numSources == 1) {
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i) out[i] = finish<T, kAverage>(static_cast<A>(a[i]), 1);
      continue;
    }
    const T* const b = source(1) + first;
    if (numSources == 2) {
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i) {
        out[i] = finish<T, kAverage>(Op::apply(static_cast<A>(a[i]), static_cast<A>(b[i])), 2);
      }
      continue;
    }
    for (std::size_t i = 0; i < n; ++i) accumulator[i] = Op::apply(static_cast<A>(a[i]), static_cast<A>(b[i]));
    for (int s = 2; s < numSources - 1; ++s) {
      const T* const c = source(s) + first;
      for (std::size_t i = 0; i < n; ++i) accumulator[i] = Op::apply(accumulator[i], static_cast<A>(c[i]));
    }
    const T* const last = source(numSources - 1) + first;
#pragma GCC ivdep
    for (std::size_t i = 0; i < n; ++i) {
      out[i] = finish<T, kAverage>(Op::apply(accumulator[i], static_cast<A>(last[i])), numSources);
    }
  }
}

// The end of an average whose sum was made in steps.
template <typename T>
FARANDOLE_VECTOR_CLONES void divide(void* dst, const void* const* sources, int numParts, std::size_t count) {
  const T* const source = static_cast<const T*>(sources[0]);
  T* const out = static_cast<T*>(dst);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = static_cast<T>(divided(static_cast<Accumulator<T>>(source[i]), numParts));
  }
}

// The average of averages. What a source counts is exact in the accumulator, and so is its product with a half.
template <typename T>
FARANDOLE_VECTOR_CLONES void averageBlocks(void* dst, const void* const* sources, const int* ranks, int numSources,
                                           std::size_t count) {
  using A = Accumulator<T>;
  A accumulator[kBlock];
  const int all = std::accumulate(ranks, ranks + numSources, 0);
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t n = std::min(kBlock, count - first);
    for (int s = 0; s < numSources; ++s) {
      const T* const source = static_cast<const T*>(sources[s]) + first;
      const auto weight = static_cast<float>(ranks[s]);
      if (s == 0) {
        for (std::size_t i = 0; i < n; ++i) accumulator[i] = static_cast<A>(source[i]) * weight;
      } else {
        for (std::size_t i = 0; i < n; ++i) accumulator[i] += static_cast<A>(source[i]) * weight;
      }
    }
    T* const out = static_cast<T*>(dst) + first;
    for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<T>(divided(accumulator[i], all));
  }
}

// What a Reduction calls, where it is defined.
struct Kernels {
  ReduceFunction function = nullptr;
  ReduceFunction partial = nullptr;
  ReduceFunction finish = nullptr;
  AverageFunction average = nullptr;
  Kernels() = default;
  Kernels(ReduceFunction all) : function(all) {}
  Kernels(ReduceFunction all, ReduceFunction some, ReduceFunction end) : function(all), partial(some), finish(end) {}
  Kernels(ReduceFunction all, AverageFunction some) : function(all), average(some) {}
};

template <typename T>
Kernels kernelsFor(ReduceOp::RedOpType op) {
  constexpr bool kOrdered = !kIsComplex<T>;
  constexpr bool kBitwise = std::is_integral_v<T>;
  switch (op) {
    case ReduceOp::SUM: return &reduceBlocks<T, Sum, false>;
    case ReduceOp::PREMUL_SUM:
      if constexpr (!kBitwise) return &reduceBlocks<T, Sum, false>;
      return {};
    case ReduceOp::PRODUCT: return &reduceBlocks<T, Product, false>;
    case ReduceOp::AVG:
      if constexpr (!std::is_same_v<T, Accumulator<T>>) {
        return {&reduceBlocks<T, Sum, true>, &averageBlocks<T>};
      } else if constexpr (!std::is_same_v<T, bool>) {
        return {&reduceBlocks<T, Sum, true>, &reduceBlocks<T, Sum, false>, &divide<T>};
      }
      return {};
    case ReduceOp::MIN:
      if constexpr (kOrdered) return &reduceBlocks<T, Min, false>;
      return {};
    case ReduceOp::MAX:
      if constexpr (kOrdered) return &reduceBlocks<T, Max, false>;
      return {};
    case ReduceOp::BAND:
      if constexpr (kBitwise) return &reduceBlocks<T, And, false>;
      return {};
    case ReduceOp::BOR:
      if constexpr (kBitwise) return &reduceBlocks<T, Or, false>;
      return {};
    case ReduceOp::BXOR:
      if constexpr (kBitwise) return &reduceBlocks<T, Xor, false>;
      return {};
    default: return {};
  }
}

Kernels lookUp(ReduceOp::RedOpType op, at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte: return kernelsFor<std::uint8_t>(op);
    case at::kChar: return kernelsFor<std::int8_t>(op);
    case at::kShort: return kernelsFor<std::int16_t>(op);
    case at::kInt: return kernelsFor<std::int32_t>(op);
    case at::kLong: return kernelsFor<std::int64_t>(op);
    case at::kUInt16: return kernelsFor<std::uint16_t>(op);
    case at::kUInt32: return kernelsFor<std::uint32_t>(op);
    case at::kUInt64: return kernelsFor<std::uint64_t>(op);
    case at::kBool: return kernelsFor<bool>(op);
    case at::kHalf: return kernelsFor<c10::Half>(op);
    case at::kBFloat16: return kernelsFor<c10::BFloat16>(op);
    case at::kFloat: return kernelsFor<float>(op);
    case at::kDouble: return kernelsFor<double>(op);
    case at::kComplexFloat: return kernelsFor<c10::complex<float>>(op);
    case at::kComplexDouble: return kernelsFor<c10::complex<double>>(op);
    case at::kComplexHalf: return kernelsFor<c10::complex<c10::Half>>(op);
    case at::kFloat8_e4m3fn: return kernelsFor<c10::Float8_e4m3fn>(op);
    case at::kFloat8_e4m3fnuz: return kernelsFor<c10::Float8_e4m3fnuz>(op);
    case at::kFloat8_e5m2: return kernelsFor<c10::Float8_e5m2>(op);
    case at::kFloat8_e5m2fnuz: return kernelsFor<c10::Float8_e5m2fnuz>(op);
    default: return {};
  }
}

constexpr const char* kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};

std::string namesFor(at::ScalarType dtype) {
  std::string names;
  for (std::size_t op = 0; op < std::size(kNames); ++op) {
    if (lookUp(static_cast<ReduceOp::RedOpType>(op), dtype).function == nullptr) continue;
    names += (names.empty() ? "" : ", ") + std::string(kNames[op]);
  }
  return names.empty() ? "a dtype that can be reduced" : names;
}

}  // namespace

collective::Reduction reductionFor(const ReduceOp& op, at::ScalarType dtype) {
  const Kernels kernels = lookUp(op.op_, dtype);
  TORCH_CHECK_TYPE(kernels.function != nullptr, "farandole: ReduceOp.",
                   op.op_ < std::size(kNames) ? kNames[op.op_] : "UNUSED", " is not defined for dtype ", dtype,
                   "; expected ", namesFor(dtype));
  return {kernels.function, c10::elementSize(dtype), static_cast<std::uint16_t>(op.op_ << 8 | static_cast<int>(dtype)),
          kernels.partial,  kernels.finish,          kernels.average};
}

std::string describeReduction(std::uint16_t code) {
  return std::string(kNames[code >> 8]) + " of " + c10::toString(static_cast<at::ScalarType>(code & 0xff));
}

std::optional<at::Scalar> premulFactor(const ReduceOp& op) {
  if (op.op_ != ReduceOp::PREMUL_SUM) return std::nullopt;
  const auto* supplement = dynamic_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr,
                    "farandole: ReduceOp.PREMUL_SUM has no factor; expected what _make_nccl_premul_sum gives");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item() : at::Scalar(supplement->double_factor);
}

}  // namespace farandole::backend
