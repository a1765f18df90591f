#include "ddp/issue_queue.h"

#include <algorithm>
#include <utility>

namespace farandole::ddp {

IssueQueue::IssueQueue(std::vector<int> groups) : order_(std::move(groups)) { arrivals_.reserve(order_.size()); }

void IssueQueue::markReady(int group) { arrivals_.push_back(group); }

std::optional<int> IssueQueue::takeNext() {
  if (issued_ == order_.size()) return std::nullopt;
  const int next = order_[issued_];
  if (std::find(arrivals_.begin(), arrivals_.end(), next) == arrivals_.end()) return std::nullopt;
  ++issued_;
  return next;
}

bool IssueQueue::setOrder(const std::vector<int>& order) {
  if (!std::is_permutation(order.begin(), order.end(), order_.begin(), order_.end())) return false;
  order_ = order;
  return true;
}

void IssueQueue::reset() {
  arrivals_.clear();
  issued_ = 0;
}

}  // namespace farandole::ddp
