#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ddp/collectives.h"

namespace farandole::ddp {

// All-to-alls of several tensors, all under way at the same time. From Python what is around one costs as much as the
// call. Any thread, one at a time.
class TensorExchange {
 public:
  // By tensor and rank, along dimension 0.
  using Splits = std::vector<std::vector<int64_t>>;

  // Nothing is sent yet. Tensors are contiguous.
  TensorExchange(Group group, std::vector<at::Tensor> sent, Splits sentSplits, Splits receivedSplits);

  // Collective; once.
  void start();

  // Waits, as await() does. What has come, in the order of what was sent. Again after a failure: throws the same.
  const std::vector<at::Tensor>& wait();

 private:
  Group group_;
  std::vector<at::Tensor> sent_;
  Splits sentSplits_;
  Splits receivedSplits_;
  std::vector<at::Tensor> received_;
  std::vector<WorkPtr> works_;
  std::size_t ended_ = 0;  // how many of them
};

}  // namespace farandole::ddp
