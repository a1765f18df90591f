#include "backend/transport/shm/ring.h"

#include <cstring>
#include <new>

#include "backend/transport/shm/cache_lines.h"

namespace farandole::transport {
namespace {

bool isInline(std::size_t bytes) { return bytes <= Cell::kInlineBytes; }
std::size_t wholeLines(std::size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

}  // namespace

std::size_t ringBytes(RingShape shape) { return sizeof(RingHeader) + sizeof(Cell) * shape.cells + shape.payloadBytes; }

RingWriter::RingWriter(std::byte* memory, RingShape shape)
    : header_(reinterpret_cast<RingHeader*>(memory)),
      cells_(reinterpret_cast<Cell*>(memory + sizeof(RingHeader))),
      payload_(memory + sizeof(RingHeader) + sizeof(Cell) * shape.cells),
      shape_(shape) {}

// In one piece: what is left before the end is skipped when it is too short.
std::uint64_t RingWriter::payloadBegin(std::size_t bytes) const {
  const std::uint64_t offset = payloadWritten_ & (shape_.payloadBytes - 1);
  return offset + bytes <= shape_.payloadBytes ? payloadWritten_ : payloadWritten_ + (shape_.payloadBytes - offset);
}

bool RingWriter::fits(std::size_t bytes) const {
  return cellsWritten_ - cellsRead_ < shape_.cells &&
         (isInline(bytes) || payloadBegin(bytes) + wholeLines(bytes) - payloadRead_ <= shape_.payloadBytes);
}

bool RingWriter::hasRoom(std::size_t bytes, bool again) {
  if (fits(bytes)) return true;
  // The reader tells now and then, but at once while somebody waits.
  if (!again) header_->writerWaits.store(1);
  cellsRead_ = header_->cellsRead.load();
  payloadRead_ = header_->payloadRead.load();
  isHeldBack_ = header_->holdsBack.load(std::memory_order_relaxed) != 0;
  if (!fits(bytes)) return false;
  if (!again) header_->writerWaits.store(0, std::memory_order_relaxed);
  return true;
}

bool RingWriter::write(const CellFields& fields, std::span<const std::byte> data) {
  if (!hasRoom(data.size(), false)) return false;
  Cell& cell = cells_[cellsWritten_ & (shape_.cells - 1)];
  cell.kind = fields.kind;
  cell.slot = fields.slot;
  cell.tag = fields.tag;
  cell.bytes = fields.bytes;
  cell.id = fields.id;
  if (fields.kind == CellKind::kRendezvous) cell.elsewhere.address = fields.address;
  if (isInline(data.size())) {
    cell.inlineBytes = static_cast<std::uint8_t>(data.size());
    if (!data.empty()) std::memcpy(cell.data.data(), data.data(), data.size());
  } else {
    const std::uint64_t begin = payloadBegin(data.size());
    cell.inlineBytes = Cell::kOutOfLine;
    cell.payload = static_cast<std::uint32_t>(begin & (shape_.payloadBytes - 1));
    if (data.size() <= kMostAskedAhead) {
      copyToClaimed(payload_ + cell.payload, data.data(), data.size());
    } else {
      std::memcpy(payload_ + cell.payload, data.data(), data.size());
    }
    payloadWritten_ = begin + wholeLines(data.size());
    cell.elsewhere.payloadEnd = payloadWritten_;
  }
  cell.turn.store(static_cast<std::uint32_t>(cellsWritten_ / shape_.cells) + 1, std::memory_order_release);
  ++cellsWritten_;
  return true;
}

RingReader::RingReader(std::byte* memory, RingShape shape)
    : header_(reinterpret_cast<RingHeader*>(memory)),
      cells_(reinterpret_cast<Cell*>(memory + sizeof(RingHeader))),
      payload_(memory + sizeof(RingHeader) + sizeof(Cell) * shape.cells),
      shape_(shape) {}

void RingReader::letGoOf(const Cell& cell) {
  claimLines(payload_ + cell.payload, cell.bytes);
  payloadRead_ = cell.elsewhere.payloadEnd;
}

bool RingReader::tellWriter() {
  cellsTold_ = cellsRead_;
  payloadTold_ = payloadRead_;
  // Ordered against the writer's flag: either it sees the room, or we see that it waits.
  header_->payloadRead.store(payloadRead_);
  header_->cellsRead.store(cellsRead_);
  return header_->writerWaits.exchange(0) != 0;
}

}  // namespace farandole::transport
