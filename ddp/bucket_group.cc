#include "ddp/bucket_group.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace farandole::ddp {

BucketGroup::BucketGroup(std::vector<Bucket> buckets, std::size_t parameters, std::size_t queue)
    : buckets_(std::move(buckets)), parameters_(parameters), queue_(queue), pending_(parameters) {}

void BucketGroup::setHook(const std::shared_ptr<CommHook>& hook, const std::vector<int>& indices) {
  for (std::size_t i = 0; i < buckets_.size(); ++i) buckets_[i].setHook(hook, indices[i]);
}

void BucketGroup::issue(const PartsOf& partsOf) {
  for (std::size_t i = 0; i < buckets_.size(); ++i) buckets_[i].issue(partsOf(i));
}

bool BucketGroup::releaseParts() {
  return std::all_of(buckets_.begin(), buckets_.end(), [](Bucket& bucket) { return bucket.releaseParts(); });
}

bool BucketGroup::advance(bool wait) {
  return std::all_of(buckets_.begin(), buckets_.end(), [wait](Bucket& bucket) { return bucket.advance(wait); });
}

// All are waited for, also after a failure: a reduction that is under way still writes into its bucket.
void BucketGroup::wait() {
  std::exception_ptr first;
  for (Bucket& bucket : buckets_) {
    try {
      bucket.wait();
    } catch (const std::exception&) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

void BucketGroup::reset() {
  pending_ = parameters_;
  for (Bucket& bucket : buckets_) bucket.reset();
}

}  // namespace farandole::ddp
