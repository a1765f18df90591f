#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/transport/shm/pull_ways.h"

namespace farandole::transport {

// How large one direction between two processes is.
struct RingShape {
  std::uint32_t cells;         // a power of two
  std::uint32_t payloadBytes;  // a power of two
};

enum class CellKind : std::uint8_t {
  kEager,       // a message, whole
  kRendezvous,  // a message that stays with the sender until the receiver asks, or has taken what came along
  kClear,       // "send it in fragments"
  kFragment,    // a part of a rendezvous message
  kFinished,    // a rendezvous message has been received, or has failed
  kRetract,     // "forget the rendezvous message, unless it is under way"
};

inline constexpr std::uint16_t kNoSlot = 0xffff;

// What a cell says.
struct CellFields {
  CellKind kind;
  std::uint64_t tag = 0;               // kFinished: the receive's; kFragment: the offset; kClear: the receiver's number
  std::uint64_t bytes = 0;             // of the message or fragment; kFinished: what the receive wanted
  std::uint32_t id = 0;                // of a rendezvous message: the sender's number, for kFragment the receiver's
  std::uint16_t slot = kNoSlot;        // kRendezvous: the sender's TransferSlot; kFinished: a StatusCode
  const std::byte* address = nullptr;  // kRendezvous: in the sender's memory
};

// One line of the cache: a message of up to 32 bytes is one cache miss for its receiver.
struct alignas(64) Cell {
  static constexpr std::size_t kInlineBytes = 32;

  std::atomic<std::uint32_t> turn;  // 1 + the number of times that the ring went round; written last
  CellKind kind;
  std::uint8_t inlineBytes;  // or kOutOfLine
  std::uint16_t slot;
  std::uint64_t tag;
  std::uint64_t bytes;
  std::uint32_t id;
  std::uint32_t payload;  // its place in the payload ring, when out of line
  union {
    std::array<std::byte, kInlineBytes> data;
    struct {
      std::uint64_t payloadEnd;  // when out of line
      const std::byte* address;  // kRendezvous, in the sender's memory
    } elsewhere;
  };

  static constexpr std::uint8_t kOutOfLine = 0xff;
  bool isOutOfLine() const { return inlineBytes == kOutOfLine; }
};
static_assert(sizeof(Cell) == 64);

inline constexpr std::size_t kTransferSlots = 16;

// A large message that both sides bring over, each the next fragments that nobody has taken: the sender's go through
// the ring, the receiver copies its own.
struct alignas(64) TransferSlot {
  std::atomic<std::uint32_t> receiver;  // 1 + the receiver's number for it; 0 until it is wanted
  std::atomic<std::uint64_t> taken;     // fragments
};

// What the two tell each other beside the cells.
struct RingHeader {
  alignas(64) std::atomic<std::uint64_t> cellsRead;
  std::atomic<std::uint64_t> payloadRead;
  std::atomic<std::uint32_t> holdsBack;  // by the reader: messages are to stay with their sender
  alignas(64) std::atomic<std::uint32_t> writerWaits;
  std::array<TransferSlot, kTransferSlots> slots;
  alignas(64) PullWays::Told pullWays;  // by the writer
};

std::size_t ringBytes(RingShape shape);

// The sending end of a one-way queue of cells in shared memory, with a second
// ring for what does not fit a cell. One writer and one reader, in two processes.
class RingWriter {
 public:
  RingWriter() = default;
  // Over zeroed memory of ringBytes(shape).
  RingWriter(std::byte* memory, RingShape shape);

  // Of more data than this lines are not asked for ahead (copyToClaimed). Messages of 128 KiB to 1 MiB, in fragments of
  // 16 KiB, take 12 to 15 % less so between cores of a Zen 5, and 4 % on two threads of a core.
  static constexpr std::size_t kMostAskedAhead = 8 << 10;

  // False when there is no room now. The reader will then say so when there is. With a kRendezvous the message comes
  // along, longer than Cell::kInlineBytes, or nothing does.
  bool write(const CellFields& fields, std::span<const std::byte> data);
  // The same of a cell with so many bytes; who looks `again` by itself is not told.
  bool hasRoom(std::size_t bytes, bool again);
  // Whether the reader wants messages to stay here until a receive wants them. That it does is seen once in a round of
  // the ring, so that it costs the others nothing; that it no longer does, at once.
  bool isHeldBack() { return isHeldBack_ && (isHeldBack_ = header_->holdsBack.load(std::memory_order_relaxed) != 0); }
  TransferSlot& slot(std::size_t index) const { return header_->slots[index]; }
  PullWays::Told& pullWays() const { return header_->pullWays; }
  std::uint32_t payloadBytes() const { return shape_.payloadBytes; }

 private:
  std::uint64_t payloadBegin(std::size_t bytes) const;
  bool fits(std::size_t bytes) const;

  RingHeader* header_ = nullptr;
  Cell* cells_ = nullptr;
  std::byte* payload_ = nullptr;
  RingShape shape_{};
  std::uint64_t cellsWritten_ = 0;
  std::uint64_t payloadWritten_ = 0;
  // What was last seen of the reader's.
  std::uint64_t cellsRead_ = 0;
  std::uint64_t payloadRead_ = 0;
  bool isHeldBack_ = false;
};

// The receiving end.
class RingReader {
 public:
  RingReader() = default;
  RingReader(std::byte* memory, RingShape shape);

  // The oldest cell that was not popped; null when there is none.
  const Cell* front() const {
    const Cell& cell = cells_[cellsRead_ & (shape_.cells - 1)];
    return cell.turn.load(std::memory_order_acquire) == turn_ ? &cell : nullptr;
  }
  // What the cell carries.
  std::span<const std::byte> payload(const Cell& cell, std::size_t bytes) const {
    return {cell.isOutOfLine() ? payload_ + cell.payload : cell.data.data(), bytes};
  }
  // Gives its room back. True when the writer waits for room and has to be woken up.
  bool pop() {
    const Cell& cell = cells_[cellsRead_ & (shape_.cells - 1)];
    if (cell.isOutOfLine()) letGoOf(cell);
    if ((++cellsRead_ & (shape_.cells - 1)) == 0) ++turn_;
    const bool isDue =
        cellsRead_ - cellsTold_ >= shape_.cells / 4 || payloadRead_ - payloadTold_ >= shape_.payloadBytes / 4;
    return (isDue || header_->writerWaits.load(std::memory_order_relaxed) != 0) && tellWriter();
  }
  // From now on messages are to stay with their sender, or no longer.
  void holdBack(bool holds) { header_->holdsBack.store(holds ? 1 : 0, std::memory_order_relaxed); }
  TransferSlot& slot(std::size_t index) const { return header_->slots[index]; }
  PullWays::Told& pullWays() const { return header_->pullWays; }

 private:
  void letGoOf(const Cell& cell);
  bool tellWriter();

  RingHeader* header_ = nullptr;
  Cell* cells_ = nullptr;
  std::byte* payload_ = nullptr;
  RingShape shape_{};
  std::uint32_t turn_ = 1;
  std::uint64_t cellsRead_ = 0;
  std::uint64_t payloadRead_ = 0;
  std::uint64_t cellsTold_ = 0;
  std::uint64_t payloadTold_ = 0;
};

}  // namespace farandole::transport
