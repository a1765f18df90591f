#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "ddp/collectives.h"

namespace farandole::ddp {

// Ranks tell each other rows of integers, a row for each rank: one all-to-all at a
// time. It costs no more than that; from Python what is around it costs more, above
// all where it is rare enough to find the caches cold. Any thread, one at a time.
class RowExchange {
 public:
  // `device`: where the group's tensors have to be.
  RowExchange(Group group, c10::Device device);

  // A row for each rank, by rank, one after the other; of the same length on all ranks. Collective.
  void start(const std::vector<int64_t>& rows);

  // Whether finish() will not wait.
  bool hasCome() const;

  // Waits, as await() does. The row of each rank for this one. However it ends, start() may come again.
  std::vector<int64_t> finish();

 private:
  // Used again for rows of the same length.
  struct Tensors {
    at::Tensor rows;  // on the CPU
    at::Tensor sent;
    at::Tensor received;
  };

  Group group_;
  c10::Device device_;
  Tensors tensors_;
  WorkPtr work_;
};

}  // namespace farandole::ddp
