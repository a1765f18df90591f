#pragma once

#include <cstddef>

#include "backend/collective/algorithms.h"

namespace farandole::collective::testing {

template <typename T>
void addUp(void* dst, const void* const* sources, int numSources, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    T sum{};
    for (int s = 0; s < numSources; ++s) sum = static_cast<T>(sum + static_cast<const T*>(sources[s])[i]);
    static_cast<T*>(dst)[i] = sum;
  }
}

template <typename T>
constexpr Reduction kSumOf{&addUp<T>, sizeof(T)};

}  // namespace farandole::collective::testing
