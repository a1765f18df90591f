#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "pipeline/runtime/message_tag.h"

namespace farandole::pipeline {

// One tensor on its way to or from one peer. Owned by a stage; the tensor must
// stay until `work` is done. `work` is null when nothing is under way.
struct Message {
  bool isSend = false;
  std::int32_t tag = 0;
  std::vector<at::Tensor> tensor{at::Tensor()};  // one element: the form in which c10d takes it
  c10::intrusive_ptr<c10d::Work> work;
};

// How the executor reaches other ranks: the one thing it asks of a transport.
// Used by the thread that runs the step. Tags are honoured; a post never waits
// for the peer. Throws what the transport throws.
class P2pChannel {
 public:
  virtual ~P2pChannel() = default;

  // Starts all of `batch`, sends and receives with `peer`, and sets each `work`.
  virtual void post(int peer, std::span<Message* const> batch) = 0;
};

}  // namespace farandole::pipeline
