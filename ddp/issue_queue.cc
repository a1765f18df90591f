#include "ddp/issue_queue.h"

#include <algorithm>
#include <utility>

namespace farandole::ddp {

IssueQueue::IssueQueue(std::vector<int> groups)
    : order_(std::move(groups)), isReady_(order_.empty() ? 0 : static_cast<std::size_t>(order_.back()) + 1, 0) {
  arrivals_.reserve(order_.size());
}

void IssueQueue::markReady(int group) {
  arrivals_.push_back(group);
  isReady_[group] = 1;
}

std::optional<int> IssueQueue::takeNext() {
  if (issued_ == order_.size()) return std::nullopt;
  const int next = order_[issued_];
  if (isReady_[next] == 0) return std::nullopt;
  ++issued_;
  return next;
}

bool IssueQueue::setOrder(const std::vector<int>& order) {
  if (!std::is_permutation(order.begin(), order.end(), order_.begin(), order_.end())) return false;
  order_ = order;
  return true;
}

void IssueQueue::reset() {
  for (const int group : arrivals_) isReady_[group] = 0;
  arrivals_.clear();
  issued_ = 0;
}

}  // namespace farandole::ddp
