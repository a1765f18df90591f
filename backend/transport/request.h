#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "backend/common/status.h"
#include "backend/p2p/message_tag.h"

namespace farandole::transport {

class Transport;

// One message in flight. The caller owns it and keeps it, and the buffer of the
// message, in place until `onDone` has run. `onDone` runs exactly once per post:
// from inside the post, or on the thread that progresses the transport. It may
// post further messages; it must not block.
struct Request {
  using OnDone = void (*)(Request&);

  OnDone onDone = nullptr;

  // Of a receive, or null: what its buffer lies in. For who cannot end one that is cancelled, and may write there until
  // it is destroyed itself: it holds that, and the receive is done. Null where it is not known, or not yet.
  using Keep = std::shared_ptr<void> (*)(Request&);
  Keep keep = nullptr;

  // Valid once done. The rest tells of the other side: what was sent, of a receive;
  // what the receive wanted, of a send that failed with kMismatch.
  Status status;
  std::size_t bytes = 0;
  std::uint64_t tag = 0;

  // The transport's own, while the message is in flight.
  Transport* owner = nullptr;  // of several that are used as one
  void* handle = nullptr;
  std::byte* data = nullptr;
  std::size_t capacity = 0;
  std::uint64_t wanted = 0;
  std::uint64_t mask = 0;
  std::uint64_t order = 0;
  Request* next = nullptr;

  // Of a receive: notes what was sent. False where it is another message than was wanted: it ends with mismatch().
  bool noteSent(std::uint64_t sentTag, std::size_t sentBytes) {
    tag = sentTag;
    bytes = sentBytes;
    return sentBytes == capacity && ((sentTag ^ wanted) & p2p::kElementField) == 0;
  }
  static Status mismatch() { return {StatusCode::kMismatch, "another size or element than the other side's"}; }

  void finish(Status outcome) {
    status = std::move(outcome);
    onDone(*this);
  }
};

}  // namespace farandole::transport
