#include "backend/net/control_group.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "backend/common/rank_name.h"
#include "backend/common/text.h"
#include "backend/net/group_tree.h"

namespace farandole::net {
namespace {

using namespace std::chrono_literals;

constexpr auto kAttachPatience = 2000ms;  // for a candidate to answer, before the next one is tried too
constexpr auto kChildPatience = 500ms;    // for a child to attach itself, before it is called
constexpr auto kRetryPause = 20ms;
constexpr int kMaxRetries = 20;

std::shared_ptr<Departures> departuresOf(const std::weak_ptr<ControlListener>& listener) {
  const auto held = listener.lock();
  return held != nullptr ? held->departures() : nullptr;
}

}  // namespace

ControlGroup::ControlGroup(EventLoop& loop, Plane& plane, const ControlTimes& times, std::string key, int rank,
                           std::vector<Member> members, std::string token, std::weak_ptr<ControlListener> listener)
    : loop_(loop),
      plane_(&plane),
      times_(times),
      key_(std::move(key)),
      rank_(rank),
      members_(std::move(members)),
      token_(std::move(token)),
      listener_(std::move(listener)),
      departures_(departuresOf(listener_)),
      gone_(members_.size()),
      aborted_(members_.size()),
      attemptTimer_(loop.context()),
      childTimer_(loop.context()),
      leaveTimer_(loop.context()),
      query_(loop, *this) {}

template <typename Handler>
void ControlGroup::after(boost::asio::steady_timer& timer, std::chrono::milliseconds time, Handler handler) {
  timer.expires_after(time);
  timer.async_wait([weak = weak_from_this(), handler](const boost::system::error_code& error) {
    const auto self = weak.lock();
    if (!error && self != nullptr && self->plane_ != nullptr && !self->settled_) handler();
  });
}

bool ControlGroup::uses(const ControlChannel& channel) const { return peers_.count(&channel) > 0; }

std::vector<ControlChannel::Ptr> ControlGroup::neighbours() const {
  std::vector<ControlChannel::Ptr> channels;
  for (const auto& [key, peer] : peers_) {
    if (peer.sent && peer.received) channels.push_back(peer.channel);
  }
  return channels;
}

void ControlGroup::join() {
  searchParent();
  expectChildren();
}

void ControlGroup::leave(bool isGone) {
  if (leaving_) return;
  leaving_ = true;
  query_.finishAnswered(true);
  listener_.reset();
  after(leaveTimer_, times_.handover, [this] {
    handed_ = true;  // nobody took it in time: all that can be done was done
    settleWhenPossible();
  });
  learn({FactKind::kLeft, rank_, rank_, isGone ? "gone" : ""}, nullptr);
}

void ControlGroup::abort(const std::string& reason) {
  if (!leaving_) learn({FactKind::kAborted, rank_, rank_, std::string(cutText(reason, kMaxReason))}, nullptr);
}

void ControlGroup::reportDeath(int rank, const std::string& reason) {
  assert(rank >= 0 && rank < size() && rank != rank_);
  learn({FactKind::kFailed, rank, rank_, std::string(cutText(reason, kMaxReason))}, nullptr);
}

void ControlGroup::drop() {
  plane_ = nullptr;
  listener_.reset();
  peers_.clear();
  attemptTimer_.cancel();
  childTimer_.cancel();
  leaveTimer_.cancel();
  suspectTimers_.clear();
}

bool ControlGroup::hasParent() const {
  return std::any_of(peers_.begin(), peers_.end(), [this](const auto& entry) {
    const Peer& peer = entry.second;
    return peer.sent && peer.received && peer.rank < rank_ && !isGone(peer.rank);
  });
}

// One candidate at a time. One that cannot be reached is suspected; one that
// is slow is kept, and the next is tried as well: a connection too many harms
// nobody.
void ControlGroup::searchParent() {
  if (plane_ == nullptr || settled_ || hasParent()) return;
  if (attempt_ >= 0 && !isGone(attempt_)) return;
  attempt_ = -1;
  for (const int candidate : parentCandidates(rank_, gone_)) {
    if (slow_.count(candidate) > 0 || suspects_.count(candidate) > 0) continue;
    attempt_ = candidate;
    break;
  }
  if (attempt_ < 0) return;
  after(attemptTimer_, kAttachPatience, [this] {
    if (attempt_ >= 0) slow_.insert(std::exchange(attempt_, -1));
    searchParent();
  });
  call(attempt_);
}

void ControlGroup::call(int rank) {
  const ControlChannel::Ptr channel = plane_->channelTo(members_[static_cast<std::size_t>(rank)].address);
  Peer& peer = peers_[channel.get()];
  peer.channel = channel;
  peer.rank = rank;
  if (channel->isOpen() && !peer.sent) sendAttach(peer);
}

// A child that dies before it attached itself would be missed by nobody.
void ControlGroup::expectChildren() {
  if (std::exchange(expecting_, true)) return;
  after(childTimer_, kChildPatience, [this] {
    expecting_ = false;
    if (!leaving_) callMissingChildren();
  });
}

void ControlGroup::callMissingChildren() {
  std::vector<bool> known(gone_);
  for (const auto& [key, peer] : peers_) known[static_cast<std::size_t>(peer.rank)] = true;
  for (const auto& [suspect, status] : suspects_) known[static_cast<std::size_t>(suspect)] = true;
  for (int rank = rank_ + 1; rank < size(); ++rank) {
    if (!known[static_cast<std::size_t>(rank)] && parentOf(rank, gone_) == rank_) call(rank);
  }
}

void ControlGroup::sendAttach(Peer& peer) {
  peer.sent = true;
  peer.channel->send(FrameType::kAttach, AttachMessage{key_, rank_, peer.channel->proof(token_, key_, rank_)}.encode());
}

void ControlGroup::channelOpened(const ControlChannel::Ptr& channel) {
  const auto found = peers_.find(channel.get());
  if (found != peers_.end() && !found->second.sent) sendAttach(found->second);
}

void ControlGroup::channelClosed(const ControlChannel::Ptr& channel, const Status& status) {
  const auto found = peers_.find(channel.get());
  if (found == peers_.end()) return;
  const Peer peer = found->second;
  peers_.erase(found);
  if (!peer.sent || !peer.received) return connectionFailed(peer.rank, channel->wasOpened(), status);
  if (isGone(peer.rank)) return searchParent();
  // In order, so it has left, and that is on its way here.
  if (status.isOk()) return suspect(peer.rank, Status::internal("it ended the connection without leaving the group"));
  learn({FactKind::kFailed, peer.rank, rank_, std::string(cutText(status.message(), kMaxReason))}, nullptr);
}

// The connection to a candidate ended before it was attached. Who took it and
// then closed is asked again; who cannot be reached is suspected: it died, or it
// left and that is not yet known here. Some other rank knows which.
void ControlGroup::connectionFailed(int rank, bool answered, const Status& status) {
  slow_.erase(rank);
  if (attempt_ == rank) attempt_ = -1;
  if (isGone(rank)) return searchParent();
  if (answered && ++retries_[rank] <= kMaxRetries) {
    if (rank > rank_) return expectChildren();
    if (attempt_ >= 0 || hasParent()) return;
    attempt_ = rank;
    after(attemptTimer_, kRetryPause * retries_[rank], [this] {
      attempt_ = -1;
      searchParent();
    });
    return;
  }
  suspect(rank, status);
}

void ControlGroup::suspect(int rank, const Status& status) {
  suspects_[rank] = status;
  auto& timer = suspectTimers_.try_emplace(rank, loop_.context()).first->second;
  after(timer, times_.grace, [this, rank] {
    const auto suspect = suspects_.find(rank);
    if (suspect == suspects_.end() || isGone(rank) || leaving_) return;
    learn({FactKind::kFailed, rank, rank_, std::string(cutText(suspect->second.message(), kMaxReason))}, nullptr);
  });
  searchParent();
}

Status ControlGroup::attach(const ControlChannel::Ptr& channel, const AttachMessage& message) {
  const bool known = message.rank < size() && message.rank != rank_ &&
                     members_[static_cast<std::size_t>(message.rank)].address.plane == channel->remotePlane();
  if (!known || !channel->verify(token_, message)) {
    return Status::internal("it is not " + nameOf(message.rank) + " of group '" + key_ + "'");
  }
  channel->trust();
  if (settled_) {
    channel->send(FrameType::kAttach, AttachMessage{key_, rank_, channel->proof(token_, key_, rank_)}.encode());
    sendFacts(channel, facts_);
    return Status::ok();
  }
  Peer& peer = peers_[channel.get()];
  if (peer.received) return Status::ok();
  peer.channel = channel;
  peer.rank = message.rank;
  peer.received = true;
  if (!peer.sent) sendAttach(peer);
  sendFacts(channel, facts_);
  retries_.erase(message.rank);
  slow_.erase(message.rank);
  suspects_.erase(message.rank);
  if (attempt_ == message.rank) attempt_ = -1;
  if (hasParent()) attemptTimer_.cancel();
  return Status::ok();
}

void ControlGroup::sendFacts(const ControlChannel::Ptr& channel, std::vector<Fact> facts) {
  for (const std::string& payload : FactsMessage{key_, std::move(facts)}.encode()) {
    channel->send(FrameType::kFacts, payload);
  }
}

void ControlGroup::facts(const ControlChannel::Ptr& channel, const FactsMessage& message) {
  const auto found = peers_.find(channel.get());
  if (found == peers_.end() || !found->second.received) return;
  const int sender = found->second.rank;
  bool farewell = false;
  for (const Fact& fact : message.facts) {
    if (fact.rank >= size()) continue;
    learn(fact, channel);
    farewell = farewell || (fact.kind == FactKind::kLeft && fact.rank == sender);
  }
  if (!farewell || settled_) return;
  if (!leaving_) channel->send(FrameType::kHanded, HandedMessage{key_}.encode());
  release(channel.get());
}

void ControlGroup::handed() {
  handed_ = handed_ || leaving_;
  settleWhenPossible();
}

void ControlGroup::learn(const Fact& fact, const ControlChannel::Ptr& from) {
  if (plane_ == nullptr) return;
  std::vector<bool>& known = fact.kind == FactKind::kAborted ? aborted_ : gone_;
  if (known[static_cast<std::size_t>(fact.rank)]) return;
  known[static_cast<std::size_t>(fact.rank)] = true;
  facts_.push_back(fact);
  for (const ControlChannel::Ptr& neighbour : neighbours()) {
    if (neighbour != from) sendFacts(neighbour, {fact});
  }
  tell(fact);
  suspects_.erase(fact.rank);
  query_.finishAnswered(false);
  searchParent();
  if (fact.kind != FactKind::kAborted) expectChildren();
  settleWhenPossible();
}

std::string ControlGroup::nameOf(int rank) const {
  const bool isKnown = rank >= 0 && rank < size();
  return rankName(rank, isKnown ? members_[static_cast<std::size_t>(rank)].globalRank : rank);
}

void ControlGroup::tell(const Fact& fact) {
  if (fact.kind == FactKind::kLeft) {
    if (departures_ != nullptr && !leaving_) departures_->add(fact.rank, !fact.reason.empty());
    return;
  }
  const auto listener = listener_.lock();
  if (listener == nullptr) return;
  const Member& member = members_[static_cast<std::size_t>(fact.rank)];
  const std::string who = rankName(fact.rank, member.globalRank, member.host, member.pid);
  if (fact.kind == FactKind::kFailed) {
    const std::string message = who + " failed: " + fact.reason + "; noticed by " + nameOf(fact.seenBy);
    listener->peerFailed(fact.rank, Status(StatusCode::kPeerFailed, message));
  } else if (fact.rank != rank_) {
    listener->aborted(fact.rank, Status::aborted(who + " aborted the group: " + fact.reason));
  }
}

void ControlGroup::release(const ControlChannel* channel) {
  const auto found = peers_.find(channel);
  if (found == peers_.end() || plane_ == nullptr) return;
  const ControlChannel::Ptr released = found->second.channel;
  peers_.erase(found);
  plane_->released(released);
}

void ControlGroup::settleWhenPossible() {
  if (!leaving_ || settled_ || plane_ == nullptr) return;
  const bool alone = std::count(gone_.begin(), gone_.end(), true) == size();
  if (!handed_ && !alone) return;
  settled_ = true;
  attempt_ = -1;
  attemptTimer_.cancel();
  childTimer_.cancel();
  leaveTimer_.cancel();
  suspectTimers_.clear();
  const auto peers = std::exchange(peers_, {});
  for (const auto& [key, peer] : peers) {
    // For one that took our attach, and whose own is on its way.
    if (peer.sent && !peer.received) sendFacts(peer.channel, facts_);
    plane_->released(peer.channel);
  }
  plane_->settled();
}

}  // namespace farandole::net
