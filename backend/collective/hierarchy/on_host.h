#pragma once

#include <span>
#include <vector>

#include "backend/collective/host_algorithms.h"

// What hierarchical collectives do in the memory of a host: any size, in pieces.
namespace farandole::collective::hierarchy {

// Slices one after the other, as one range of bytes.
class Stream {
 public:
  Stream() = default;
  explicit Stream(std::vector<Slice> slices) : slices_(std::move(slices)), bytes_(totalBytes(slices_)) {}

  std::size_t bytes() const { return bytes_; }
  // Runs run(slice, offset) for what lies in `bytes` from `first`; `offset` counts from there.
  template <typename Run>
  void forEach(std::size_t first, std::size_t bytes, const Run& run) const {
    std::size_t begin = 0;  // of the slice
    const std::size_t end = std::min(first + bytes, bytes_);
    for (const Slice& slice : slices_) {
      const std::size_t from = std::max(first, begin);
      const std::size_t to = std::min(end, begin + slice.bytes);
      if (from < to) run(Slice{slice.data + (from - begin), to - from}, from - first);
      begin += slice.bytes;
    }
  }

 private:
  std::vector<Slice> slices_;
  std::size_t bytes_ = 0;
};

// Rank `owners[i]` combines all ranks' inputs[i], one after the other, into `output`, which
// may be the memory of its own. Others than owners give `output` as null.
void reduceToOwners(Program& program, HostSegment& host, const Contract& contract, const Combiner& sum,
                    std::span<const int> owners, std::byte* output, std::span<const Stream> inputs);

// Ranks 0 up to blocks.size() have blocks[i] in their memory and give it to all the others.
// The contract is null where the ranks have met already.
void shareBlocks(Program& program, HostSegment& host, const Contract* contract, std::span<const Stream> blocks);

}  // namespace farandole::collective::hierarchy
