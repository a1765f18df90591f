#pragma once

#include <cstddef>
#include <vector>

#include "ddp/bucket.h"

namespace farandole::ddp {

// Buckets that are reduced together, once the gradients of all of them are there.
// Not synchronized: its GradReducer is.
class BucketGroup {
 public:
  // `parameters`: how many it waits for. `queue`: of the communicator that it goes by.
  BucketGroup(std::vector<Bucket> buckets, std::size_t parameters, std::size_t queue);

  std::size_t queue() const { return queue_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }

  // True when it was the last.
  bool markReady() { return --pending_ == 0; }

  // As Bucket's.
  void issue();
  bool advance(bool wait);
  void wait();

  // For the next round.
  void reset();

 private:
  std::vector<Bucket> buckets_;
  std::size_t parameters_;
  std::size_t queue_;
  std::size_t pending_;
};

}  // namespace farandole::ddp
