#include "backend/transport/shm/ring.h"

#include <cstring>
#include <new>

#include "backend/transport/shm/cache_lines.h"

namespace farandole::transport {
namespace {

constexpr std::size_t kLine = 64;

}  // namespace

std::size_t ringBytes(RingShape shape) { return sizeof(RingHeader) + sizeof(Cell) * shape.cells + shape.payloadBytes; }

RingWriter::RingWriter(std::byte* memory, RingShape shape)
    : header_(reinterpret_cast<RingHeader*>(memory)),
      cells_(reinterpret_cast<Cell*>(memory + sizeof(RingHeader))),
      payload_(memory + sizeof(RingHeader) + sizeof(Cell) * shape.cells),
      shape_(shape) {}

bool RingWriter::hasRoom(std::size_t bytes, std::uint64_t& begin) {
  return cellsWritten_ - cellsRead_ < shape_.cells && (bytes == 0 || reservePayload(bytes, begin));
}

// In one piece: what is left before the end is skipped when it is too short.
bool RingWriter::reservePayload(std::size_t bytes, std::uint64_t& begin) {
  const std::uint64_t offset = payloadWritten_ & (shape_.payloadBytes - 1);
  begin = offset + bytes <= shape_.payloadBytes ? payloadWritten_ : payloadWritten_ + (shape_.payloadBytes - offset);
  return begin + bytes - payloadRead_ <= shape_.payloadBytes;
}

bool RingWriter::write(const CellFields& fields, std::span<const std::byte> data) {
  const bool isInline = data.size() <= Cell::kInlineBytes;
  const std::size_t payload = isInline ? 0 : (data.size() + kLine - 1) / kLine * kLine;
  std::uint64_t begin = 0;
  if (!hasRoom(payload, begin)) {
    // The reader tells now and then, but at once while somebody waits.
    header_->writerWaits.store(1);
    cellsRead_ = header_->cellsRead.load();
    payloadRead_ = header_->payloadRead.load();
    if (!hasRoom(payload, begin)) return false;
    header_->writerWaits.store(0, std::memory_order_relaxed);
  }
  Cell& cell = cells_[cellsWritten_ & (shape_.cells - 1)];
  cell.kind = fields.kind;
  cell.slot = fields.slot;
  cell.tag = fields.tag;
  cell.bytes = fields.bytes;
  cell.id = fields.id;
  if (fields.kind == CellKind::kRendezvous) {
    cell.inlineBytes = 0;
    cell.address = fields.address;
  } else if (isInline) {
    cell.inlineBytes = static_cast<std::uint8_t>(data.size());
    if (!data.empty()) std::memcpy(cell.data.data(), data.data(), data.size());
  } else {
    cell.inlineBytes = Cell::kOutOfLine;
    cell.payload = static_cast<std::uint32_t>(begin & (shape_.payloadBytes - 1));
    std::memcpy(payload_ + cell.payload, data.data(), data.size());
    payloadWritten_ = begin + payload;
    cell.payloadEnd = payloadWritten_;
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

bool RingReader::pop() {
  const Cell& cell = cells_[cellsRead_ & (shape_.cells - 1)];
  if (cell.inlineBytes == Cell::kOutOfLine) {
    claimLines(payload_ + cell.payload, cell.bytes);
    payloadRead_ = cell.payloadEnd;
  }
  if ((++cellsRead_ & (shape_.cells - 1)) == 0) ++turn_;
  const bool writerWaits = header_->writerWaits.load(std::memory_order_relaxed) != 0;
  const bool isDue =
      cellsRead_ - cellsTold_ >= shape_.cells / 4 || payloadRead_ - payloadTold_ >= shape_.payloadBytes / 4;
  if (!isDue && !writerWaits) return false;
  cellsTold_ = cellsRead_;
  payloadTold_ = payloadRead_;
  // Ordered against the writer's flag: either it sees the room, or we see that it waits.
  header_->payloadRead.store(payloadRead_);
  header_->cellsRead.store(cellsRead_);
  return header_->writerWaits.exchange(0) != 0;
}

}  // namespace farandole::transport
