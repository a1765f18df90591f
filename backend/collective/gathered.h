#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "backend/collective/reduction.h"

namespace farandole::collective {

// Data that lies in several places, one after another. Does not own them, nor the list of them.
class Gathered {
 public:
  explicit Gathered(std::span<const Slice> slices) : slices_(slices) {}

  // Calls run(place, slice) for each part of the `bytes` from `begin` on; places count from there. Cheap where calls
  // go from place to place, in either direction.
  template <typename Run>
  void forEach(std::size_t begin, std::size_t bytes, const Run& run) const {
    const std::size_t end = begin + bytes;
    for (std::size_t at = begin; at < end;) {
      seek(at);
      const std::size_t within = at - first_;
      const std::size_t size = std::min(slices_[index_].bytes - within, end - at);
      run(at - begin, Slice{slices_[index_].data + within, size});
      at += size;
    }
  }

 private:
  void seek(std::size_t at) const {
    while (at < first_) first_ -= slices_[--index_].bytes;
    while (at >= first_ + slices_[index_].bytes) first_ += slices_[index_++].bytes;
  }

  std::span<const Slice> slices_;
  mutable std::size_t index_ = 0;  // of the slice that was looked at last
  mutable std::size_t first_ = 0;  // where it begins
};

}  // namespace farandole::collective
