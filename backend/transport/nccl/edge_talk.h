#pragma once

#include <functional>
#include <span>

#include "backend/transport/nccl/edge_order.h"

namespace farandole::transport {

// Carries what ranks tell each other of their edges: apart from these, through the CPU. Any thread.
class EdgeTalk {
 public:
  virtual ~EdgeTalk() = default;

  // Who hears what is told of the device with this ordinal, in the order of each peer's telling; what came before, too.
  // It is called on a thread that everybody waits for: it must be quick, and tell nothing itself.
  using Listener = std::function<void(int peer, std::span<const EdgeWord> words)>;
  virtual void listen(int device, Listener listener) = 0;
  // From now on, what this peer tells is heard.
  virtual void open(int peer) = 0;
  // Of one device. Returns at once; words arrive in order. A peer that is gone does not hear them.
  virtual void tell(int peer, std::span<const EdgeWord> words) = 0;

  // An error that names both sides of what should be one message. `isSend`: by this rank.
  virtual Status describe(int peer, bool isSend, const EdgeOrder::Difference& difference) const = 0;
};

}  // namespace farandole::transport
