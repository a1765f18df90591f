// Receives that are cancelled when a part of their message has come. UCX ends such a one with the rest of it, and has
// no way to take its buffer back: a connection that is closed by force still brings what was on its way, as does one
// that only the peer has made (1.22 over TCP: the kernel goes on sending for who was killed). So where the rest may
// never come, the receive is done without it, and the buffer is held for as long as the worker.
#include <algorithm>
#include <utility>

#include "backend/transport/ucx/ucx_transport.h"

namespace farandole::transport {

void UcxTransport::cancel(Request& request) {
  if (request.handle == nullptr) return;
  ucp_request_cancel(worker_, request.handle);
  const bool isPending = request.handle != nullptr && request.keep != nullptr;
  if (isPending && std::ranges::find(cancelled_, &request) == cancelled_.end()) cancelled_.push_back(&request);
}

// Of a receive from any peer UCX does not tell whose message it is.
bool UcxTransport::isGone(PeerId from) const {
  if (from != kAnyPeer) return !failure(from);
  return std::ranges::any_of(peers_, [](const Peer& peer) { return !peer.failure; });
}

// Not as soon as the peer is gone: what UCX ends by itself needs no buffer held.
void UcxTransport::endCancelled() {
  for (std::size_t i = 0; i < cancelled_.size();) {
    Request& request = *cancelled_[i];
    const bool isOver = isGone(PeerId{static_cast<std::uint32_t>(request.order)});
    std::shared_ptr<void> buffer = isOver ? request.keep(request) : nullptr;
    if (buffer == nullptr) {
      ++i;
      continue;
    }
    kept_.push_back(std::move(buffer));
    cancelled_.erase(cancelled_.begin() + static_cast<std::ptrdiff_t>(i));
    ucp_request_free(std::exchange(request.handle, nullptr));  // it goes on by itself, and is told to nobody
    request.finish(ucxError("receive", UCS_ERR_CANCELED));
  }
}

}  // namespace farandole::transport
