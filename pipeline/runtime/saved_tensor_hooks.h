#pragma once

#include <cstdint>
#include <vector>

namespace farandole::pipeline {

// Notes which operations of this thread save tensors through hooks (activation checkpointing, offloading), as long as
// it lives: the sequence numbers of their autograd nodes, ascending. Each unpacking of such a tensor in another
// backward runs the hook again, which for a checkpoint is the forward. An operation costs a call while one of these
// lives; one at a time in a thread.
class SavedTensorHookWatch {
 public:
  explicit SavedTensorHookWatch(std::vector<std::uint64_t>& hookedOps);
  ~SavedTensorHookWatch();
  SavedTensorHookWatch(const SavedTensorHookWatch&) = delete;
  SavedTensorHookWatch& operator=(const SavedTensorHookWatch&) = delete;

 private:
  std::uint64_t handle_;
};

}  // namespace farandole::pipeline
