// Messages that are too large for a ring.
#include <algorithm>
#include <cstring>

#include "backend/transport/shm/shm_transport.h"
#include "backend/transport/shm/single_copy.h"
#include "backend/transport/shm/streaming_copy.h"

namespace farandole::transport {
namespace {

using Clock = std::chrono::steady_clock;

// From here on the sender helps; below, where messages are held back, one call by the receiver does it.
constexpr std::size_t kSharedBytes = PullWays::kSmallest;
// Up to here the message comes along with its offer while there is room: a receive that waits for it takes it at once,
// and nobody reads the other one's memory (half a round trip of 16 KiB, on two threads of a core 2.65 us -> 0.68,
// between cores 3.8 -> 2.2; 48 KiB 4.9 -> 1.5, 7.2 -> 3.8; 64 KiB 9.4 -> 5 between cores).
constexpr std::size_t kMostCarried = 64 << 10;
// What is counted, and what the sender puts into the ring at once; how many of these the receiver copies at once.
constexpr std::size_t kFragmentBytes = 16 << 10;
constexpr std::size_t kFragmentsPerCopy = 16;
// From here on the sender puts in two at once (16 MiB each way at once, through the ring alone: 1.69 ms, so and not
// asked ahead 1.39, where two bare processes with a ring of 256K take 0.97 to 1.15; 4 MiB 7 % less, 1 MiB the same).
constexpr std::size_t kLargeBytes = 4 << 20;
constexpr std::size_t kFragmentsOfLarge = 2;
static_assert(kFragmentBytes > RingWriter::kMostAskedAhead);
// From here on it is worth waking up a sender that waits asleep.
constexpr std::size_t kWakeBytes = 1 << 20;
// How many empty calls the receiver waits for a sender that may be at hand before it
// copies itself, some 2 us, and how many more each fragment is worth, but 20 us or so at most: a
// sender whose fragments only trickle does something else. (A quarter of each: between cores whose messages take 0.4 us
// the receiver lost patience with a sender that was about to send, 128 KiB 12.8 us instead of 7.4.)
constexpr int kCallsForFirst = 128;
constexpr int kCallsForFragment = 256;
constexpr int kMostCalls = 1024;
// Up to here the receiver copies at once where that is cheap. What is larger passes through the ring faster one way (64
// MiB 8.8 to 9.6 ms, 10.9 to 11.6), though not both ways at once (16.5 to 18.6, 13.8 to 14.7).
constexpr std::size_t kMostEager = 16 << 20;
// From here on what comes through the ring goes past the receiver's caches.
constexpr std::size_t kStreamedMessageBytes = 8 << 20;

std::size_t numFragments(std::size_t bytes) { return (bytes + kFragmentBytes - 1) / kFragmentBytes; }

// How much of it the sender puts into the ring at once.
std::size_t pieceOf(std::size_t bytes) { return (bytes >= kLargeBytes ? kFragmentsOfLarge : 1) * kFragmentBytes; }

// Takes the next fragments: where they begin, or `bytes` when none is left.
std::size_t take(TransferSlot& slot, std::size_t count, std::size_t bytes) {
  if (slot.taken.load(std::memory_order_relaxed) >= numFragments(bytes)) return bytes;
  return std::min(slot.taken.fetch_add(count, std::memory_order_relaxed) * kFragmentBytes, bytes);
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

// What tells a receiver of a message that stays here.
ShmTransport::Queued ShmTransport::makeOffer(Link& link, std::uint64_t tag, const std::byte* data, std::size_t bytes,
                                             Request& request) {
  if (bytes == 0) data = probe_.data();  // the place of nothing may be null, which would say that it has come along
  const std::uint32_t id = takeEntry(outgoing_, freeOutgoing_);
  Outgoing& outgoing = outgoing_[id];
  outgoing = {&request, &link, data, bytes, id};
  request.handle = &outgoing;
  if (bytes >= kSharedBytes && link.freeSlots != 0 && !link.isSelf) {
    outgoing.slot = static_cast<std::uint16_t>(std::countr_zero(link.freeSlots));
    link.freeSlots &= link.freeSlots - 1;
    TransferSlot& slot = link.writer.slot(outgoing.slot);
    slot.receiver.store(0, std::memory_order_relaxed);
    slot.taken.store(0, std::memory_order_relaxed);
    helped_.push_back(id);
  }
  return {{CellKind::kRendezvous, tag, bytes, id, outgoing.slot, data}};
}

void ShmTransport::offer(Link& link, std::uint64_t tag, const std::byte* data, std::size_t bytes, Request& request) {
  request.status = Status::ok();
  Queued item = makeOffer(link, tag, data, bytes, request);
  if (!link.isSelf) {
    const bool comesAlong = Cell::kInlineBytes < bytes && bytes <= kMostCarried && !link.writer.isHeldBack();
    if (comesAlong && link.backlog.empty() && link.writer.hasRoom(bytes, /*again=*/true)) item.data = data;
    return post(link, item);
  }
  auto message = matcher_.makeMessage();
  message->tag = tag;
  message->bytes = bytes;
  message->peer = link.id;
  message->remoteId = item.fields.id;
  message->remote = item.fields.address;
  matcher_.addMessage(std::move(message));
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
                  : code == StatusCode::kPeerLeft ? Status(code, "the group is over there")
                                                  : Status(code, "the receiver could not read the message"));
}

void ShmTransport::pull(Link& link, Request& request, const Unexpected& message) {
  const Wanted wanted{request.wanted, request.capacity};
  if (link.isSelf) {
    deliver(request, message.tag, message.remote, message.bytes);
    finishOutgoing(link, message.remoteId, request.status.code(), wanted);
    return request.onDone(request);
  }
  Status status = request.noteSent(message.tag, message.bytes) ? Status::ok() : Request::mismatch();
  bool isOver = false;
  if (!status || message.bytes == 0 || (canRead(link.reading) && message.bytes < kSharedBytes)) {
    if (status) status = copyFromProcess(link.pid, request.data, message.remote, message.bytes);
    isOver = status.code() == StatusCode::kPeerFailed;
    if (!isOver) {
      tellFinished(link, message.remoteId, status.code(), wanted);
      return request.finish(std::move(status));
    }
  }
  bool isEager = link.reading == Reading::kCheap && message.bytes <= kMostEager;
  const bool isMeasured = isEager && !isOver && options_.singleCopy == ShmOptions::SingleCopy::kAuto;
  if (isMeasured) {
    const bool leads = meetingPoint_.token() < link.token;
    PullWays::Told& told = leads ? link.writer.pullWays() : link.reader.pullWays();
    isEager = link.pullWays.readsAtOnce(message.bytes, told, leads);
  }
  const std::uint32_t id = takeEntry(pulls_, freePulls_);
  Pull& pull = pulls_[id];
  pull = {.request = &request,
          .link = &link,
          .from = message.remote,
          .bytes = message.bytes,
          .id = message.remoteId,
          .slot = static_cast<std::uint16_t>(message.slot),
          .isStreamed = !canRead(link.reading),
          .isOver = isOver,
          .isEager = isEager,
          .isMeasured = isMeasured,
          .begun = isMeasured ? Clock::now() : Clock::time_point(),
          .patience = kCallsForFirst};
  request.handle = &request;
  if (pull.isEager) ++numEager_;
  if (isOver) return;
  if (pull.isStreamed) {
    tell(link, CellKind::kClear, message.remoteId, id);
  } else if (pull.slot != kNoSlot) {
    link.reader.slot(pull.slot).receiver.store(id + 1, std::memory_order_release);
    if (message.bytes >= kWakeBytes) wakeWaiter(link);
  }
}

Status ShmTransport::readMemory(PeerId peer, void* to, const void* from, std::size_t bytes) {
  return copyFromProcess(links_[static_cast<std::uint32_t>(peer)].pid, static_cast<std::byte*>(to),
                         static_cast<const std::byte*>(from), bytes);
}

void ShmTransport::finish(Pull& pull, Status status) {
  Request& request = *std::exchange(pull.request, nullptr);
  if (pull.isEager) --numEager_;
  if (pull.isMeasured && status) {
    const auto cost = static_cast<std::uint64_t>((Clock::now() - pull.begun).count());
    pull.link->pullWays.note(pull.bytes, pull.isEager, cost);
  }
  freePulls_.push_back(static_cast<std::uint32_t>(
      std::find_if(pulls_.begin(), pulls_.end(), [&](const Pull& p) { return &p == &pull; }) - pulls_.begin()));
  request.handle = nullptr;
  tellFinished(*pull.link, pull.id, status.code());
  request.finish(std::move(status));
}

bool ShmTransport::advancePulls() {
  bool any = false;
  for (std::size_t i = 0; i < pulls_.size(); ++i) {
    if (pulls_[i].request != nullptr && !pulls_[i].isStreamed && !pulls_[i].isOver) any |= advance(pulls_[i]);
  }
  return any;
}

// Where the kernel's way costs more than twice the ring's for each page (measured, 16 MiB each way: 3.0 ms and 2.2), it
// is for a sender that does something else. Where it is cheap the receiver begins at once (that way and this one in
// turns, each way: 256 KiB 51 to 64 us and 35 to 56, 1 MiB 219 to 273 and 97 to 209, 4 MiB 0.78 to 0.95 ms and 0.42 to
// 0.65, 16 MiB 3.1 to 3.7 and 1.7 to 2.8; one way no clear difference).
bool ShmTransport::advance(Pull& pull) {
  std::size_t begin = pull.come;
  if (pull.slot != kNoSlot) {
    if (pull.patience > 0 && !pull.isEager && isAtHand()) {  // who is not looks too seldom to count
      --pull.patience;
      return false;
    }
    begin = take(pull.link->reader.slot(pull.slot), kFragmentsPerCopy, pull.bytes);
    if (begin == pull.bytes) return false;  // the sender is at its last fragment
  }
  const std::size_t bytes = std::min(kFragmentsPerCopy * kFragmentBytes, pull.bytes - begin);
  Status status = copyFromProcess(pull.link->pid, pull.request->data + begin, pull.from + begin, bytes);
  pull.isOver = status.code() == StatusCode::kPeerFailed;
  if (pull.isOver) return true;
  if (pull.failure) pull.failure = std::move(status);
  noteCome(pull, bytes);
  return true;
}

void ShmTransport::noteCome(Pull& pull, std::size_t bytes) {
  pull.come += bytes;
  if (pull.come == pull.bytes) finish(pull, std::exchange(pull.failure, Status::ok()));
}

void ShmTransport::receiveFragment(Link& link, const Cell& cell) {
  Pull* pull = cell.id < pulls_.size() ? &pulls_[cell.id] : nullptr;
  if (pull != nullptr && (pull->request == nullptr || pull->link != &link || cell.tag + cell.bytes > pull->bytes)) {
    pull = nullptr;
  }
  const std::size_t bytes = cell.bytes;
  if (pull != nullptr) {
    std::byte* const to = pull->request->data + cell.tag;
    const std::byte* const from = link.reader.payload(cell, bytes).data();
    if (pull->bytes < kStreamedMessageBytes) {
      std::memcpy(to, from, bytes);
    } else {
      streamingCopy(to, from, bytes);
    }
  }
  if (link.reader.pop()) wake(link);
  if (pull == nullptr) return;
  pull->patience = std::min(pull->patience + kCallsForFragment, kMostCalls);
  noteCome(*pull, bytes);
}

// What this side can do for the messages that it sends. What the receiver can do itself is not for the loop of a
// process whose threads do something else: it would take their cores, and come late (measured, beside a sender that
// computes, 1 and 16 MiB: 600 us and 4.9 ms instead of 470 us and 3.3 ms).
bool ShmTransport::helpSends(bool again) {
  bool any = false;
  // While both copy what they receive, a piece in the ring would be copied twice.
  const bool isFree = numEager_ == 0 && isAtHand();
  for (const std::uint32_t id : helped_) {
    if (outgoing_[id].isStreamed || isFree) any |= stream(outgoing_[id], again);
  }
  return any;
}

// Where the piece begins that is to go into the ring now; the end of the message when there is none.
std::size_t ShmTransport::nextToStream(Outgoing& outgoing) {
  if (outgoing.isStreamed) {
    return std::exchange(outgoing.streamed, std::min(outgoing.streamed + pieceOf(outgoing.bytes), outgoing.bytes));
  }
  TransferSlot& slot = outgoing.link->writer.slot(outgoing.slot);
  const std::uint32_t receiver = slot.receiver.load(std::memory_order_acquire);
  if (receiver == 0) return outgoing.bytes;
  outgoing.pull = receiver - 1;
  return take(slot, pieceOf(outgoing.bytes) / kFragmentBytes, outgoing.bytes);
}

bool ShmTransport::stream(Outgoing& outgoing, bool again) {
  Link& link = *outgoing.link;
  const std::size_t piece = pieceOf(outgoing.bytes);
  bool any = false;
  // Not before what waits for room already. What is taken has room, and goes at once: the receiver could not have it
  // otherwise.
  while (link.backlog.empty() && link.writer.hasRoom(piece, again)) {
    const std::size_t begin = nextToStream(outgoing);
    if (begin >= outgoing.bytes) break;
    const std::size_t bytes = std::min(piece, outgoing.bytes - begin);
    const CellFields fields{.kind = CellKind::kFragment, .tag = begin, .bytes = bytes, .id = outgoing.pull};
    link.writer.write(fields, {outgoing.data + begin, bytes});
    wake(link);
    any = true;
  }
  return any;
}

// Something that only this process can advance, now.
bool ShmTransport::isWorkLeft() const {
  const auto canAdvance = [](const Pull& pull) {
    if (pull.request == nullptr || pull.isStreamed || pull.isOver) return false;
    if (pull.slot == kNoSlot) return true;
    return pull.link->reader.slot(pull.slot).taken.load() < numFragments(pull.bytes);
  };
  return std::any_of(pulls_.begin(), pulls_.end(), canAdvance);
}

}  // namespace farandole::transport
