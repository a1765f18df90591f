#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backend/transport/shm/memory.h"

namespace farandole::collective {

enum class CollectiveKind : std::uint8_t {
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kBarrier,
};

// What a rank is about to do; ranks that meet compare it.
struct Contract {
  CollectiveKind kind = CollectiveKind::kBarrier;
  std::uint16_t reduction = 0;  // Reduction::code
  std::uint32_t root = 0;
  std::uint64_t bytes = 0;  // of what has the same size on all ranks
  bool operator==(const Contract&) const = default;
};

// One collective's place in the sequence of a group: its steps are counted from
// `base`; all before it is over for those who have come to `base`.
struct HostTurn {
  std::uint64_t base = 0;
  int parity = 0;
};

// Memory that the ranks of a group share when all of them are on one host. Each
// rank has an area that it alone writes, and a counter that says how far it is.
//
// The collectives of a group run one after the other, and each counts every
// rank's counter up by the same number of steps. So a counter that has come to
// the end of a collective says that its rank is done with the one before.
class HostSegment {
 public:
  // Of each rank's area. Slots are for data that is handed over whole, one for
  // collectives with an even number, one for odd ones: a slot is written again
  // when everybody has begun the collective in between. Windows are for data
  // that passes by in pieces, alternating inside one collective.
  static constexpr std::size_t kSlotBytes = 64 << 10;
  static constexpr std::size_t kWindowBytes = 128 << 10;
  static constexpr std::size_t kResultBytes = kWindowBytes / 2;

  static std::size_t bytes(int size);
  // Over zeroed memory of bytes(size), which all ranks map.
  HostSegment(transport::SharedMemory memory, int rank, int size);

  int size() const { return size_; }

  // In the order in which the collectives are called, equal on all ranks.
  HostTurn nextTurn(std::uint64_t steps);

  // This rank's counter.
  void signal(std::uint64_t value) { line(rank_).counter.store(value); }  // a full fence
  bool hasCome(int rank, std::uint64_t value) const {
    return line(rank).counter.load(std::memory_order_acquire) >= value;
  }

  // This rank gives up, because `culprit` died or for a reason of its own (kNobody):
  // who waits for it need not.
  static constexpr int kNobody = -1;
  void abandon(int culprit) { line(rank_).abandonedFor.store(culprit + 2); }
  bool isAbandoned(int rank) const { return line(rank).abandonedFor.load(std::memory_order_relaxed) != 0; }
  int culpritOf(int rank) const { return line(rank).abandonedFor.load() - 2; }

  // `rank` has aborted the group: nobody's operations shall go on. The first one counts.
  void abort(int rank);
  int abortedBy() const { return line(0).abortedBy.load() - 1; }  // or kNobody

  // Written before the first signal of a turn, read after it.
  void setContract(HostTurn turn, const Contract& contract) { line(rank_).contracts[turn.parity] = contract; }
  const Contract& contract(int rank, HostTurn turn) const { return line(rank).contracts[turn.parity]; }

  std::byte* slot(int rank, HostTurn turn) const { return area(rank) + turn.parity * kSlotBytes; }
  std::byte* window(int rank, std::size_t piece) const {
    return area(rank) + 2 * kSlotBytes + piece % 2 * kWindowBytes;
  }
  std::byte* result(int rank, std::size_t piece) const {
    return area(rank) + 2 * kSlotBytes + 2 * kWindowBytes + piece % 2 * kResultBytes;
  }

 private:
  struct alignas(64) Line {
    std::atomic<std::uint64_t> counter;
    std::atomic<int> abandonedFor;  // 0: it goes on; else the culprit, plus 2
    std::atomic<int> abortedBy;     // of the first line alone, for all: the rank, plus 1; or 0
    Contract contracts[2];
  };

  Line& line(int rank) const { return reinterpret_cast<Line*>(memory_.data())[rank]; }
  std::byte* area(int rank) const;

  const transport::SharedMemory memory_;
  const int rank_;
  const int size_;
  std::uint64_t nextBase_ = 0;
  std::uint64_t turns_ = 0;
};

}  // namespace farandole::collective
