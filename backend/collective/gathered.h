#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>

#include "backend/collective/reduction.h"

namespace farandole::collective {

// Data that lies in several places, one after another. Does not own them, nor the list of them.
class Gathered {
 public:
  explicit Gathered(std::span<const Slice> slices) : slices_(slices) {}

  std::size_t bytes() const {
    return std::accumulate(slices_.begin(), slices_.end(), std::size_t{0},
                           [](std::size_t sum, const Slice& slice) { return sum + slice.bytes; });
  }

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

// Calls run(place, in, out) for each part of the `bytes` from `from` on in the input, and from `to` on in the output,
// that lies in one place in both.
template <typename Run>
void forEachOfBoth(const Gathered& input, std::size_t from, const Gathered& output, std::size_t to, std::size_t bytes,
                   const Run& run) {
  input.forEach(from, bytes, [&](std::size_t place, Slice in) {
    output.forEach(to + place, in.bytes, [&](std::size_t within, Slice out) {
      run(place + within, Slice{in.data + within, out.bytes}, out);
    });
  });
}

}  // namespace farandole::collective
