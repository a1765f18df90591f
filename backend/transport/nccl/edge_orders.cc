#include "backend/transport/nccl/edge_orders.h"

#include <thread>

namespace farandole::transport {

void EdgeOrders::begin(OnNews onNews) {
  onNews_ = std::move(onNews);
  talk_->listen(device_, [weak = weak_from_this()](int peer, std::span<const EdgeWord> words) {
    if (const auto self = weak.lock()) self->hear(peer, words);
  });
}

Status EdgeOrders::statusOf(EdgeKey key, const EdgeOrder::Outcome& outcome) const {
  if (outcome.difference) return talk_->describe(key.peer, key.isSend, *outcome.difference);
  if (outcome.isStuck) {
    return Status::internal("rank " + std::to_string(key.peer) +
                            " has captured messages along this edge in a graph: the order of a batch whose tags do not "
                            "ascend cannot be agreed on any more");
  }
  return Status::ok();
}

Result<EdgeOrder::Order> EdgeOrders::post(EdgeKey key, std::span<const EdgeMessage> messages) {
  std::lock_guard lock(mutex_);
  EdgeOrder& order = orders_[key];
  EdgeWord base{};
  base.device = static_cast<std::uint16_t>(device_);
  base.flags = key.isSend ? EdgeWord::kIsSend : 0;
  notes_.clear();
  for (const EdgeMessage& message : messages) notes_.push_back(message.note);
  if (messages.front().isCaptured) order.end(base);
  const auto outcome = order.post(notes_, base);
  if (!outcome) return outcome.status();
  FARANDOLE_RETURN_IF_ERROR(statusOf(key, *outcome));
  isUntold_ = true;
  if (outcome->order == EdgeOrder::Order::kUnknown) isUrgent_ = true;
  return outcome->order;
}

std::optional<EdgeOrder::Order> EdgeOrders::takeSettled(EdgeKey key) {
  std::lock_guard lock(mutex_);
  const auto found = orders_.find(key);
  return found == orders_.end() ? std::nullopt : found->second.takeSettled();
}

void EdgeOrders::tell(bool onlyUrgent) {
  if (!(onlyUrgent ? isUrgent_ : isUntold_)) return;
  std::lock_guard inTurn(telling_);
  std::map<int, std::vector<EdgeWord>> words;
  {
    std::lock_guard lock(mutex_);
    isUrgent_ = false;
    isUntold_ = false;
    for (auto& [key, order] : orders_) {
      if (order.hasUntold()) order.takeUntold(words[key.peer]);
    }
  }
  for (const auto& [peer, told] : words) talk_->tell(peer, told);
}

void EdgeOrders::hear(int peer, std::span<const EdgeWord> words) {
  for (const EdgeWord& word : words) {
    const EdgeKey key{peer, (word.flags & EdgeWord::kIsSend) == 0};
    EdgeOrder::Outcome outcome;
    {
      std::lock_guard lock(mutex_);
      outcome = orders_[key].hear(word);
    }
    const Status status = statusOf(key, outcome);
    // Ending a group, and calling NCCL, take long.
    if (!status || outcome.hasSettled) std::thread(onNews_, key, status).detach();
  }
}

}  // namespace farandole::transport
