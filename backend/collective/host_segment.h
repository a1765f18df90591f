#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "backend/transport/shm/memory.h"
#include "backend/transport/transport.h"

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
  std::uint64_t bytes = 0;    // of what has the same size on all ranks
  std::uint64_t longest = 0;  // of the parts, one for each rank, that this consists of; or 0
  // Of two ranks that swap: what this one gives the other one, and wants of it.
  std::uint64_t given = 0;
  std::uint64_t wanted = 0;

  bool isSameCall(const Contract& other) const {
    return kind == other.kind && reduction == other.reduction && root == other.root && bytes == other.bytes &&
           longest == other.longest;
  }
};

// One collective's place in the sequence of a group: its steps are counted from
// `base`; all before it is over for those who have come to `base`.
struct HostTurn {
  std::uint64_t base = 0;
  std::uint64_t number = 0;  // from 0 on
  std::uint64_t parity() const { return number % 2; }
};

// Data that a rank has for one of the others, or for all of them.
struct Offer {
  enum class Way : std::uint8_t {
    kSlot,     // it is in the slot of the turn
    kMemory,   // it stays where it is, and is read from there
    kMessage,  // it comes as a message
  };
  std::uint64_t bytes = 0;
  std::uint64_t place = 0;  // in the slot, or the address in the memory of its process
  Way way = Way::kSlot;
};

// Memory that the ranks of a group share that are on one host. Each has an area
// that it alone writes (but two ranks change places, reduce in each other's windows, and only
// readers claim lines), and a counter that says how far it is. Ranks are named by their index among those of the host,
// which is the rank when the group is all there.
//
// The collectives of a group run one after the other, and each counts every
// rank's counter up by the same number of steps. So a counter that has come to
// the end of a collective says that its rank is done with the one before, and of
// this one with all windows that another rank may write next.
class HostSegment {
 public:
  // Of each rank's area. Slots are for data that is handed over whole, one for
  // collectives with an even number, one for odd ones: a slot is written again
  // when everybody has begun the collective in between. Windows are for data
  // that passes by in pieces, in turn inside one collective.
  static constexpr std::size_t kSlotBytes = 64 << 10;
  static constexpr std::size_t kWindows = 3;  // and results, half as large: one for each stage of the pipeline

  // How large windows are is up to the rank that makes the memory, which writes it there.
  static constexpr std::size_t kWindowBytes = 128 << 10;
  static constexpr std::size_t kSmallestWindow = 8 << 10;
  static constexpr std::size_t kLargestWindow = 64 << 20;
  // The setting FARANDOLE_SHM_WINDOW_BYTES; rounded down so that results are whole pages.
  static Result<std::size_t> windowBytesSetting();

  // Zeroed memory for `size` ranks, which all ranks of the host are to map.
  static Result<transport::SharedMemory> create(int size, std::size_t windowBytes);
  // What another rank created.
  static Result<transport::SharedMemory> open(transport::Descriptor descriptor, int size);
  HostSegment(transport::SharedMemory memory, int index, int size);

  int index() const { return index_; }
  int size() const { return size_; }
  std::size_t windowBytes() const { return windowBytes_; }

  // In the order in which the collectives are called, equal on all ranks.
  HostTurn nextTurn(std::uint64_t steps);

  // The last collective that was called, and whether this rank meets all others in it, who are told if they call
  // another one. If not, the next one finds out: contracts are written over in the turn after that.
  struct Call {
    HostTurn turn;
    Contract contract;
    bool meetsAll = true;
  };
  const Call& lastCall() const { return lastCall_; }
  void noteCall(HostTurn turn, const Contract& contract) { lastCall_ = {turn, contract, false}; }
  void noteMeeting(HostTurn turn) { lastCall_.meetsAll = lastCall_.meetsAll || lastCall_.turn.base == turn.base; }

  // This rank's counter.
  void signal(std::uint64_t value) {
    noteCore();
    line(index_).counter.store(value, std::memory_order_release);
  }
  bool hasCome(int index, std::uint64_t value) const {
    return line(index).counter.load(std::memory_order_acquire) >= value;
  }

  // Whether it sleeps, when its door is armed, until others count up: after expecting it, a full fence and another
  // look.
  void expectRing(bool expects) {
    if (isRingExpected(index_) != expects) line(index_).expectsRing.store(expects, std::memory_order_relaxed);
  }
  bool isRingExpected(int index) const { return line(index).expectsRing.load(std::memory_order_relaxed); }

  // The core that this rank goes on with its collectives on: the calling thread's; and the one that a rank did last.
  void noteCore() { line(index_).core.store(sched_getcpu(), std::memory_order_relaxed); }
  int coreOf(int index) const { return line(index).core.load(std::memory_order_relaxed); }

  // This rank gives up, because `culprit`, a rank of the group, died or for a reason of its own (kNobody):
  // who waits for it need not.
  static constexpr int kNobody = -1;
  // The first reason stays, cut to what has room; the culprit may be found out later.
  void abandon(int culprit, std::string_view reason);
  bool isAbandoned(int index) const { return line(index).abandonedFor.load(std::memory_order_acquire) != 0; }
  int culpritOf(int index) const { return line(index).abandonedFor.load() - 2; }
  std::string reasonOf(int index) const { return line(index).reason; }  // of one that has given up or aborted

  // This rank, which has this number in the group, aborts it: nobody's operations shall go on. The first one counts.
  void abort(int rank, std::string_view reason);
  int abortedBy() const { return line(0).abortedBy.load() - 1; }  // or kNobody

  // Written before the first signal of a turn, read after it.
  void setContract(HostTurn turn, const Contract& contract) { line(index_).contracts[turn.parity()] = contract; }
  const Contract& contract(int index, HostTurn turn) const { return line(index).contracts[turn.parity()]; }

  // What the first rank tells for all turns after this one, before its first signal of this; and the last that it told
  // in a turn before this one, or 0, once this rank has begun it: the same on all.
  void tellForLater(HostTurn turn, std::uint16_t what);
  std::uint16_t toldBefore(HostTurn turn) const;

  // How this rank reads the memory of the others' processes, once it has heard of all: the worst of it. And the worst
  // that any rank has told, the same for all; unknown until all have.
  void tellReading(transport::Reading reading) { line(index_).reading.store(reading); }
  transport::Reading toldBy(int index) const { return line(index).reading.load(); }
  transport::Reading reading();
  bool everybodyReads() { return canRead(reading()); }

  // What a rank has for each of the others, or in the first one what it has for all. Written and read as a slot is.
  Offer& offer(int index, HostTurn turn, int entry) const;

  // Two ranks write in turns where the other one has written: what a rank writes to it has read last, and its core need
  // not take it over first (docs/design.md, Memory changes hands).
  std::byte* slot(int index, HostTurn turn) const {
    return area(size_ == 2 && changesHands(turn.number / 2) ? 1 - index : index) + turn.parity() * kSlotBytes;
  }
  std::byte* window(int index, std::size_t piece) const {
    return area(index) + 2 * kSlotBytes + piece % kWindows * windowBytes_;
  }
  // What one rank passes to another one, counted over all turns, where each has a share of every window: they write to
  // it in turns, as to slots.
  std::byte* passed(int from, int to, std::uint64_t piece, std::size_t share) const {
    if (changesHands(piece / kWindows)) std::swap(from, to);
    return window(from, piece) + static_cast<std::size_t>(to) * share;
  }
  // Of two ranks, who need no results: the same memory, as two windows of twice the length.
  static constexpr std::size_t kLongWindows = 2;
  std::size_t longWindowBytes() const { return 2 * windowBytes_; }
  std::byte* longPassed(int from, std::uint64_t piece) const {
    static_assert(kLongWindows * 2 <= kWindows + kWindows / 2);
    return window(changesHands(piece / kLongWindows) ? 1 - from : from, 0) + piece % kLongWindows * longWindowBytes();
  }
  std::byte* result(int index, std::size_t piece) const {
    return area(index) + 2 * kSlotBytes + kWindows * windowBytes_ + piece % kWindows * (windowBytes_ / 2);
  }

 private:
  static constexpr std::size_t kReasonBytes = 2048;
  struct alignas(64) Line {
    std::atomic<std::uint64_t> counter;
    std::atomic<int> core;          // that it was last counted up on
    std::atomic<int> abandonedFor;  // 0: it goes on; else the culprit, plus 2
    std::atomic<int> abortedBy;     // of the first line alone, for all: the rank, plus 1; or 0
    std::atomic<bool> expectsRing;
    std::uint64_t windowBytes;           // of the first line alone, for all
    std::atomic<std::uint64_t> told[2];  // the same: each time the older one is written
    Contract contracts[2];
    char reason[kReasonBytes];  // ends with a zero
    std::atomic<transport::Reading> reading;
  };

  static bool changesHands(std::uint64_t use) { return use % 2 == 1; }
  void noteReason(std::string_view reason);
  Line& line(int index) const { return reinterpret_cast<Line*>(memory_.data())[index]; }
  static std::size_t dataBytes(std::size_t windowBytes) { return 2 * kSlotBytes + kWindows * windowBytes * 3 / 2; }
  static std::size_t areaBytes(int size, std::size_t windowBytes);
  static std::size_t bytes(int size, std::size_t windowBytes);
  std::byte* area(int index) const;

  const transport::SharedMemory memory_;
  const int index_;
  const int size_;
  const std::size_t windowBytes_;
  std::uint64_t nextBase_ = 0;
  std::uint64_t turns_ = 0;
  Call lastCall_;
  transport::Reading reading_ = transport::Reading::kUnknown;
  bool hasReason_ = false;
};

}  // namespace farandole::collective
