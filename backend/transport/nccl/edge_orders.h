#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "backend/transport/nccl/edge.h"
#include "backend/transport/nccl/edge_talk.h"

namespace farandole::transport {

// The order of every edge of a rank on one device, and what is told of them. Any thread.
class EdgeOrders : public std::enable_shared_from_this<EdgeOrders> {
 public:
  // What was unknown on an edge is known; or, with an error, both ends do not agree, or never will. On a thread of its
  // own.
  using OnNews = std::function<void(EdgeKey, const Status&)>;
  // `device`: its ordinal among those that the rank has used.
  EdgeOrders(std::shared_ptr<EdgeTalk> talk, int device) : talk_(std::move(talk)), device_(device) {}
  void begin(OnNews onNews);
  // Before anything is posted to edges with this peer. Not with anything held that a listener takes.
  void open(int peer) { talk_->open(peer); }

  // Messages of one edge and one batch. An error: they do not fit what the other end has posted, or their order can
  // never be known (kInvalidArgument).
  Result<EdgeOrder::Order> post(EdgeKey key, std::span<const EdgeMessage> messages);
  // See EdgeOrder::takeSettled().
  std::optional<EdgeOrder::Order> takeSettled(EdgeKey key);
  // Tells the peers what was posted; `onlyUrgent`: if one may wait for it.
  void tell(bool onlyUrgent);

 private:
  void hear(int peer, std::span<const EdgeWord> words);
  Status statusOf(EdgeKey key, const EdgeOrder::Outcome& outcome) const;

  const std::shared_ptr<EdgeTalk> talk_;
  const int device_;
  OnNews onNews_;
  std::mutex telling_;  // before mutex_: what is taken first is told first
  std::mutex mutex_;
  std::map<EdgeKey, EdgeOrder> orders_;
  std::vector<EdgeNote> notes_;  // of one post
  std::atomic<bool> isUntold_{false};
  std::atomic<bool> isUrgent_{false};
};

}  // namespace farandole::transport
