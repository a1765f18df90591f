#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "pipeline/runtime/p2p_channel.h"

namespace farandole::pipeline {

// The channel over any c10d backend that sends CPU tensors with tags: one send
// or recv per message, straight to the backend.
class ProcessGroupChannel final : public P2pChannel {
 public:
  explicit ProcessGroupChannel(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  void post(int peer, std::span<Message* const> batch) override;

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace farandole::pipeline
