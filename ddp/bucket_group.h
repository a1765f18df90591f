#pragma once

#include <cstddef>
#include <functional>
#include <memory>
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

  // `indices`: of its buckets.
  void setHook(const std::shared_ptr<CommHook>& hook, const std::vector<int>& indices);

  // Those of the i-th of its buckets, see Bucket::issue().
  using PartsOf = std::function<Parts(std::size_t i)>;

  // As Bucket's.
  void issue(const PartsOf& partsOf);
  bool takesParts() const { return buckets_.front().takesParts(); }
  bool isAveraged() const { return buckets_.front().isAveraged(); }
  bool releaseParts();
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
