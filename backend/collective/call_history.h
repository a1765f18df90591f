#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/collective/host_segment.h"
#include "backend/common/digest.h"
#include "backend/p2p/message_tag.h"

namespace farandole::collective {

// The collectives that this rank has called in a group, in order. Their messages carry a mark of all of them, by which
// ranks find out that they have called different ones, also where nobody has waited for anybody in those.
class CallHistory {
 public:
  void add(const Contract& call) {
    calls_[count_++ % kKept] = call;
    digest_.add((static_cast<std::int64_t>(call.kind) << 48) | (std::int64_t{call.reduction} << 32) | call.root);
    digest_.add(static_cast<std::int64_t>(call.bytes));
  }

  std::uint64_t count() const { return count_; }
  // As much as a message has room for: one of 64 pairs of different calls is not told by their own messages, but by
  // those of the next call, or of the one after that.
  std::uint32_t mark() const { return static_cast<std::uint32_t>(digest_.value() >> (64 - p2p::kElementBits)); }

  // The last ones of the first `count`, oldest first, as far as they are kept.
  std::vector<Contract> lastOf(std::uint64_t count) const {
    std::vector<Contract> calls;
    for (std::uint64_t i = count < kTold ? 0 : count - kTold; i < count; ++i) {
      if (i + kKept >= count_) calls.push_back(calls_[i % kKept]);
    }
    return calls;
  }

 private:
  static constexpr std::uint64_t kKept = 16;
  static constexpr std::uint64_t kTold = 3;

  Digest digest_;
  std::uint64_t count_ = 0;
  std::array<Contract, kKept> calls_;
};

}  // namespace farandole::collective
