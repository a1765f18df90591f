// Messages that are too large for a ring.
#include <algorithm>
#include <cstring>

#include "backend/transport/shm/shm_transport.h"
#include "backend/transport/shm/single_copy.h"

namespace farandole::transport {
namespace {

// From here on both sides copy (measured: 1 MiB 35 us instead of 50, 64 MiB 7.7 ms
// instead of 15), piece by piece; below one call by the receiver does it.
constexpr std::size_t kSharedBytes = 512 << 10;
constexpr std::size_t kPieceBytes = 256 << 10;
// From here on it is worth waking up a sender that sleeps.
constexpr std::size_t kWakeBytes = 1 << 20;
constexpr std::size_t kFragmentBytes = 8 << 10;

std::size_t numPieces(std::size_t bytes) { return (bytes + kPieceBytes - 1) / kPieceBytes; }

// Copies the next piece that nobody has taken; false when there is none.
template <typename Copy>
bool copyPiece(TransferSlot& slot, std::size_t bytes, const Copy& copy) {
  const std::size_t begin = slot.taken.fetch_add(1) * kPieceBytes;
  if (begin >= bytes) return false;
  if (!copy(begin, std::min(kPieceBytes, bytes - begin))) slot.failed.store(true);
  slot.finished.fetch_add(1);
  return true;
}

template <typename Entry>
std::uint32_t takeEntry(std::deque<Entry>& entries, std::vector<std::uint32_t>& free) {
  if (free.empty()) {
    entries.emplace_back();
    return static_cast<std::uint32_t>(entries.size() - 1);
  }
  const std::uint32_t index = free.back();
  free.pop_back();
  return index;
}

}  // namespace

void ShmTransport::offer(Link& link, std::uint64_t tag, const std::byte* data, std::size_t bytes, Request& request) {
  const std::uint32_t id = takeEntry(outgoing_, freeOutgoing_);
  Outgoing& outgoing = outgoing_[id];
  outgoing = {&request, &link, data, bytes, id};
  request.status = Status::ok();
  request.handle = &outgoing;
  if (link.isSelf) {
    auto message = matcher_.makeMessage();
    message->tag = tag;
    message->bytes = bytes;
    message->peer = link.id;
    message->remoteId = id;
    message->remote = data;
    matcher_.addMessage(std::move(message));
    return;
  }
  if (bytes >= kSharedBytes && link.freeSlots != 0) {
    outgoing.slot = static_cast<std::uint16_t>(std::countr_zero(link.freeSlots));
    link.freeSlots &= link.freeSlots - 1;
    TransferSlot& slot = link.writer.slot(outgoing.slot);
    slot.destination.store(nullptr, std::memory_order_relaxed);
    slot.taken.store(0, std::memory_order_relaxed);
    slot.finished.store(0, std::memory_order_relaxed);
    slot.failed.store(false, std::memory_order_relaxed);
    helped_.push_back(id);
  }
  post(link, {{CellKind::kRendezvous, tag, bytes, id, outgoing.slot, data}});
}

Request* ShmTransport::release(Outgoing& outgoing) {
  if (outgoing.slot != kNoSlot) outgoing.link->freeSlots |= 1u << outgoing.slot;
  std::erase(helped_, outgoing.id);
  freeOutgoing_.push_back(outgoing.id);
  outgoing.request->handle = nullptr;
  return std::exchange(outgoing.request, nullptr);
}

void ShmTransport::finishOutgoing(Link& link, std::uint32_t id, StatusCode code, Wanted wanted) {
  if (id >= outgoing_.size() || outgoing_[id].request == nullptr || outgoing_[id].link != &link) return;
  Request* const request = release(outgoing_[id]);
  request->tag = wanted.tag;
  request->bytes = wanted.bytes;
  request->finish(code == StatusCode::kOk         ? Status::ok()
                  : code == StatusCode::kAborted  ? Status::aborted("cancelled")
                  : code == StatusCode::kMismatch ? Status(code, "the receiver wants another size or element")
                                                  : Status(code, "the receiver could not read the message"));
}

void ShmTransport::pull(Link& link, Request& request, const Unexpected& message) {
  const Wanted wanted{request.wanted, request.capacity};
  if (link.isSelf) {
    deliver(request, message.tag, message.remote, message.bytes);
    finishOutgoing(link, message.remoteId, request.status.code(), wanted);
    return request.onDone(request);
  }
  Status status = request.noteSent(message.tag, message.bytes);
  if (!status || (link.canCopy && message.bytes < kSharedBytes)) {
    if (status) status = copyFromProcess(link.pid, request.data, message.remote, message.bytes);
    tellFinished(link, message.remoteId, status.code(), wanted);
    return request.finish(std::move(status));
  }
  const std::uint32_t id = takeEntry(pulls_, freePulls_);
  Pull& pull = pulls_[id];
  pull = {
      &request,     &link, message.remote, message.bytes, 0, message.remoteId, static_cast<std::uint16_t>(message.slot),
      !link.canCopy};
  request.handle = &request;
  if (pull.isStreamed) {
    tell(link, CellKind::kClear, message.remoteId, id);
  } else if (pull.slot != kNoSlot) {
    link.reader.slot(pull.slot).destination.store(request.data, std::memory_order_release);
    if (message.bytes >= kWakeBytes) wake(link);
  }
}

Status ShmTransport::readMemory(PeerId peer, void* to, const void* from, std::size_t bytes) {
  return copyFromProcess(links_[static_cast<std::uint32_t>(peer)].pid, static_cast<std::byte*>(to),
                         static_cast<const std::byte*>(from), bytes);
}

void ShmTransport::finish(Pull& pull, Status status) {
  Request& request = *std::exchange(pull.request, nullptr);
  freePulls_.push_back(static_cast<std::uint32_t>(
      std::find_if(pulls_.begin(), pulls_.end(), [&](const Pull& p) { return &p == &pull; }) - pulls_.begin()));
  request.handle = nullptr;
  tellFinished(*pull.link, pull.id, status.code());
  request.finish(std::move(status));
}

bool ShmTransport::advancePulls() {
  bool any = false;
  for (std::size_t i = 0; i < pulls_.size(); ++i) {
    if (pulls_[i].request != nullptr && !pulls_[i].isStreamed) any |= advance(pulls_[i]);
  }
  return any;
}

bool ShmTransport::advance(Pull& pull) {
  const auto copy = [&](std::size_t begin, std::size_t bytes) {
    return copyFromProcess(pull.link->pid, pull.request->data + begin, pull.from + begin, bytes);
  };
  if (pull.slot != kNoSlot) {
    TransferSlot& slot = pull.link->reader.slot(pull.slot);
    if (copyPiece(slot, pull.bytes, copy)) return true;
    if (slot.finished.load() < numPieces(pull.bytes)) return false;  // the sender is at its last piece
    if (!slot.failed.load()) {
      finish(pull, Status::ok());
      return true;
    }
    pull.slot = kNoSlot;  // one of both could not: all of it again, by this side, which says why
  }
  const std::size_t bytes = std::min(kPieceBytes, pull.bytes - pull.copied);
  Status status = copy(pull.copied, bytes);
  pull.copied += bytes;
  if (!status || pull.copied == pull.bytes) finish(pull, std::move(status));
  return true;
}

void ShmTransport::receiveFragment(Link& link, const Cell& cell) {
  Pull* pull = cell.id < pulls_.size() ? &pulls_[cell.id] : nullptr;
  if (pull != nullptr && (pull->request == nullptr || pull->link != &link || cell.tag + cell.bytes > pull->bytes)) {
    pull = nullptr;
  }
  if (pull != nullptr) {
    std::memcpy(pull->request->data + cell.tag, link.reader.payload(cell, cell.bytes).data(), cell.bytes);
    pull->copied += cell.bytes;
  }
  if (link.reader.pop()) wake(link);
  if (pull != nullptr && pull->copied == pull->bytes) finish(*pull, Status::ok());
}

// What this side can do for the messages that it sends: copy a piece into the
// receiver's memory, put fragments into the ring.
bool ShmTransport::helpSends() {
  bool any = false;
  for (const std::uint32_t id : helped_) {
    Outgoing& outgoing = outgoing_[id];
    any |= outgoing.isStreamed ? stream(outgoing) : help(outgoing);
  }
  return any;
}

bool ShmTransport::help(Outgoing& outgoing) {
  if (!outgoing.link->canCopy) return false;
  TransferSlot& slot = outgoing.link->writer.slot(outgoing.slot);
  std::byte* const destination = slot.destination.load(std::memory_order_acquire);
  if (destination == nullptr || slot.taken.load(std::memory_order_relaxed) >= numPieces(outgoing.bytes)) return false;
  const bool any = copyPiece(slot, outgoing.bytes, [&](std::size_t begin, std::size_t bytes) {
    return copyToProcess(outgoing.link->pid, destination + begin, outgoing.data + begin, bytes).isOk();
  });
  wake(*outgoing.link);
  return any;
}

bool ShmTransport::stream(Outgoing& outgoing) {
  Link& link = *outgoing.link;
  bool any = false;
  // Not before what waits for room already.
  while (link.backlog.empty() && outgoing.streamed < outgoing.bytes) {
    const std::size_t bytes = std::min(kFragmentBytes, outgoing.bytes - outgoing.streamed);
    const CellFields fields{.kind = CellKind::kFragment, .tag = outgoing.streamed, .bytes = bytes, .id = outgoing.pull};
    if (!link.writer.write(fields, {outgoing.data + outgoing.streamed, bytes})) break;
    outgoing.streamed += bytes;
    any = true;
    wake(link);
  }
  return any;
}

// Something that only this process can advance, now.
bool ShmTransport::isWorkLeft() const {
  const auto canAdvance = [](const Pull& pull) {
    if (pull.request == nullptr || pull.isStreamed) return false;
    if (pull.slot == kNoSlot) return true;
    const TransferSlot& slot = pull.link->reader.slot(pull.slot);
    const std::size_t pieces = numPieces(pull.bytes);
    return slot.taken.load() < pieces || slot.finished.load() >= pieces;
  };
  return std::any_of(pulls_.begin(), pulls_.end(), canAdvance);
}

}  // namespace farandole::transport
