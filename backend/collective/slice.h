#pragma once

#include <algorithm>
#include <cstddef>

namespace farandole::collective {

// A piece of memory, in bytes.
struct Slice {
  std::byte* data;
  std::size_t bytes;
};

// A part of some data, in bytes.
struct Extent {
  Slice of(Slice data) const { return {data.data + begin, bytes}; }

  std::size_t begin;
  std::size_t bytes;
};

// What belongs to `owner` of `size`, in whole elements.
inline Extent shardOf(int owner, int size, std::size_t elementSize, std::size_t bytes) {
  const std::size_t elements = bytes / elementSize;
  const std::size_t first = elements * owner / size;
  const std::size_t last = elements * (owner + 1) / size;
  return {first * elementSize, (last - first) * elementSize};
}
inline Slice shardOf(int owner, int size, std::size_t elementSize, Slice data) {
  return shardOf(owner, size, elementSize, data.bytes).of(data);
}

// One of nothing, too: ranks meet there.
inline std::size_t numPieces(std::size_t bytes, std::size_t pieceBytes) {
  return std::max<std::size_t>(1, (bytes + pieceBytes - 1) / pieceBytes);
}

// Empty beyond the end.
inline Slice pieceOf(Slice data, std::size_t piece, std::size_t pieceBytes) {
  const std::size_t begin = std::min(piece * pieceBytes, data.bytes);
  return {data.data + begin, std::min(pieceBytes, data.bytes - begin)};
}

}  // namespace farandole::collective
