#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backend/common/status.h"

namespace farandole {

// A message that is sent or received again and again: the same peer, tag, size and
// dtype, another buffer each time or the same. What does not change is settled when
// it is made; sending one of up to 8 KiB on a host, and receiving one, then allocates
// nothing. The fast path of what replays a plan.
//
// On the wire it is what c10d's send and recv of that tag are, and matches those. An
// error is final: all that is started after it fails alike.
//
// Thread: one at a time.
class RepeatedMessage {
 public:
  // Gives up what is under way. Its buffer may then still be used: see keep().
  virtual ~RepeatedMessage() = default;

  // Begins the next one, once wait() has returned for the one before. `data` is used until then.
  virtual void start(void* data) = 0;
  // Blocks until it is done, or until the timeout that the group had when this was made.
  // Ok at once when nothing was started.
  virtual Status wait() = 0;
  // Whether wait() would return at once.
  virtual bool isDone() const = 0;
  // After an error or before giving up: holds `buffer` until the transport no longer uses it, also
  // beyond the end of this object.
  virtual void keep(std::shared_ptr<void> buffer) = 0;
};

struct RepeatedMessageSpec {
  bool isSend = false;
  int peer = 0;
  int tag = 0;
  std::size_t bytes = 0;
  int dtype = 0;  // a c10::ScalarType

  bool operator==(const RepeatedMessageSpec&) const = default;
};

// What a backend implements that has them, beside c10d::Backend.
class RepeatedMessages {
 public:
  virtual ~RepeatedMessages() = default;
  // An error names what of `spec` is wrong.
  virtual Result<std::unique_ptr<RepeatedMessage>> repeat(const RepeatedMessageSpec& spec) = 0;
};

}  // namespace farandole
