#include "ddp/issue_queue.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ddp/order_learning.h"

namespace farandole::ddp {

IssueQueue::IssueQueue(std::vector<int> groups)
    : groups_(std::move(groups)), order_(groups_.size()), isReady_(groups_.size(), 0), arrived_(groups_.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  arrivals_.reserve(groups_.size());
}

void IssueQueue::markReady(int group) {
  const auto place =
      static_cast<std::size_t>(std::lower_bound(groups_.begin(), groups_.end(), group) - groups_.begin());
  arrivals_.push_back(place);
  isReady_[place] = 1;
}

std::optional<int> IssueQueue::takeNext() {
  if (issued_ == order_.size()) return std::nullopt;
  const std::size_t next = order_[issued_];
  if (isReady_[next] == 0) return std::nullopt;
  ++issued_;
  return groups_[next];
}

std::vector<int> IssueQueue::places() const {
  const auto last = static_cast<int>(groups_.size());
  std::vector<int> places(groups_.size(), last);
  for (std::size_t i = 0; i < std::min(arrivals_.size(), arrived_); ++i) places[arrivals_[i]] = static_cast<int>(i);
  return places;
}

void IssueQueue::orderBy(const std::vector<int>& places) { order_ = OrderLearning::orderOf(places); }

std::vector<int> IssueQueue::order() const {
  std::vector<int> order;
  order.reserve(order_.size());
  for (const std::size_t place : order_) order.push_back(groups_[place]);
  return order;
}

void IssueQueue::reset() {
  for (const std::size_t place : arrivals_) isReady_[place] = 0;
  arrivals_.clear();
  arrived_ = groups_.size();
  issued_ = 0;
}

}  // namespace farandole::ddp
