#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/common/status.h"

namespace farandole::transport {

class Transport;

// One message in flight. The caller owns it and keeps it, and the buffer of the
// message, in place until `onDone` has run. `onDone` runs exactly once per post:
// from inside the post, or on the thread that progresses the transport. It may
// post further messages; it must not block.
struct Request {
  using OnDone = void (*)(Request&);

  OnDone onDone = nullptr;

  // Valid once done.
  Status status;
  std::size_t bytes = 0;  // received
  std::uint64_t tag = 0;  // matched, of a receive

  // The transport's own, while the message is in flight.
  Transport* owner = nullptr;  // of several that are used as one
  void* handle = nullptr;
  std::byte* data = nullptr;
  std::size_t capacity = 0;
  std::uint64_t wanted = 0;
  std::uint64_t mask = 0;
  std::uint64_t order = 0;
  Request* next = nullptr;

  void finish(Status outcome) {
    status = std::move(outcome);
    onDone(*this);
  }
};

}  // namespace farandole::transport
