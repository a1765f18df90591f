#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ddp/collectives.h"
#include "ddp/staging_memory.h"

namespace farandole::ddp {

// The all-to-all of several tensors on the CPU as one, of their bytes. Any thread, one at a time.
//
// One is all on its way, or done, without another turn of this rank: of several the later ones begin when somebody
// looks again, for which the loop is woken up, beside who computes. That is worth two copies of what goes to others,
// and what is sent is not held between the two steps: it goes back to the heap as soon as it is made.
class TensorExchange {
 public:
  // By tensor and rank, along dimension 0.
  using Splits = std::vector<std::vector<int64_t>>;

  // Copies what is sent; nothing is under way yet. Tensors are contiguous, and on the CPU.
  TensorExchange(Group group, std::shared_ptr<StagingMemory> memory, const std::vector<at::Tensor>& sent,
                 Splits sentSplits);

  // What comes; nothing is under way yet.
  void expect(Splits receivedSplits);

  // Collective; once, after expect().
  void start();

  // Waits, as await() does. What has come, in the order of what was sent. Again after a failure: throws the same.
  const std::vector<at::Tensor>& wait();

 private:
  // Of a tensor, but for how many rows come.
  struct Form {
    std::vector<int64_t> sizes;
    at::TensorOptions options;
    std::size_t bytesOfRow;
  };

  // What goes to another rank, or comes from it: its part of each tensor, one after the other. None for this rank.
  std::vector<int64_t> bytesByRank(const Splits& splits) const;
  // Calls `part` for each part of a rank and tensor with its bytes, and their number; also for those of this rank.
  template <typename Part>
  void forEachPart(const std::vector<at::Tensor>& tensors, const Splits& splits, Part part) const;
  void pack(const std::vector<at::Tensor>& sent);
  void unpack();

  Group group_;
  std::shared_ptr<StagingMemory> memory_;
  Splits sentSplits_;
  Splits receivedSplits_;
  std::vector<Form> forms_;
  at::Tensor outgoing_;  // what goes to others, and after that what stays on this rank
  at::Tensor incoming_;
  int64_t bytesToOthers_ = 0;
  WorkPtr work_;
  std::vector<at::Tensor> received_;
  bool hasEnded_ = false;
};

}  // namespace farandole::ddp
