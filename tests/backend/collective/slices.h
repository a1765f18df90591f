#pragma once

#include <algorithm>
#include <vector>

#include "backend/collective/algorithms.h"

namespace farandole::collective::testing {

template <typename T>
Slice sliceOf(std::vector<T>& data) {
  return {reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(T)};
}

template <typename T>
std::vector<Slice> slicesOf(std::vector<std::vector<T>>& all) {
  std::vector<Slice> slices(all.size());
  std::ranges::transform(all, slices.begin(), sliceOf<T>);
  return slices;
}

}  // namespace farandole::collective::testing
