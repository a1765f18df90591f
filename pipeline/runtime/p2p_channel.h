#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <span>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "backend/common/repeated_message.h"
#include "pipeline/runtime/message_tag.h"

namespace farandole::pipeline {

// One tensor on its way to or from one peer. Owned by a stage, and kept from step
// to step with its tensor replaced, which stays until the message is done.
struct Message {
  bool isSend = false;
  std::int32_t tag = 0;
  std::vector<at::Tensor> tensor{at::Tensor()};  // one element: the form in which c10d takes it

  Message() = default;
  Message(Message&& other) : Message() { *this = std::move(other); }
  Message& operator=(Message&& other);
  ~Message() { release(); }

  // Blocks until it is done, if it is under way; throws what the transport throws.
  void wait();
  // Whether wait() would return at once; may stay false where a backend does not tell.
  bool isDone() const;
  // Gives up what is under way, and the tensor.
  void release();

  // The channel's. Under way is `work`, or the line where `isStarted`.
  c10::intrusive_ptr<c10d::Work> work;
  std::unique_ptr<RepeatedMessage> line;
  RepeatedMessageSpec lineSpec;
  bool isStarted = false;
};

// How the executor reaches other ranks: the one thing it asks of a transport.
// Used by the thread that runs the step. Tags are honoured; a post never waits
// for the peer. Throws what the transport throws.
class P2pChannel {
 public:
  virtual ~P2pChannel() = default;

  // Starts all of `batch`, sends and receives with `peer`.
  virtual void post(int peer, std::span<Message* const> batch) = 0;

  // By all ranks, before the first message of a tensor on `device`: returns when messages to and from `peers`, which
  // ascend, need no more preparation.
  virtual void connect(at::Device device, std::span<const int> peers) = 0;
};

// The channel over any c10d backend that sends CPU tensors with tags: by its
// repeated messages where it has them, else one send or recv per message. What is
// on a device goes over `onDevice`, where waiting may be the current stream's and
// messages may match in the order in which they are posted. With `hasOneQueue` what
// is posted at once is one batch of c10d's there.
std::unique_ptr<P2pChannel> makeChannel(c10::intrusive_ptr<c10d::Backend> onHost,
                                        c10::intrusive_ptr<c10d::Backend> onDevice, bool hasOneQueue);

}  // namespace farandole::pipeline
