#include "backend/collective/communicator.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "backend/collective/program.h"
#include "backend/common/rank_name.h"

namespace farandole::collective {

using transport::ProgressEngine;

namespace {

std::vector<std::string> hostIdentities(const std::vector<Member>& members) {
  std::vector<std::string> identities;
  identities.reserve(members.size());
  for (const Member& member : members) identities.push_back(member.hostIdentity);
  return identities;
}

}  // namespace

Status checkSameAlgorithms(int rank, const Member& member, int otherRank, const Member& other) {
  if (member.algorithms == other.algorithms) return Status::ok();
  return Status::invalidArgument("FARANDOLE_ALGORITHMS is '" + member.algorithms + "' on " +
                                 rankName(rank, member.globalRank) + ", '" + other.algorithms + "' on " +
                                 rankName(otherRank, other.globalRank) + "; expected the same on all ranks");
}

Communicator::Communicator(transport::Connections& connections, std::shared_ptr<void> keepAlive, int rank,
                           std::vector<Member> members, AlgorithmTable table)
    : connections_(connections),
      keepAlive_(std::move(keepAlive)),
      rank_(rank),
      members_(std::move(members)),
      layout_(hostIdentities(members_)),
      table_(std::move(table)),
      peers_(members_.size()),
      topology_{rank, size()} {
  topology_.layout = layout_.numHosts() > 1 ? &layout_ : nullptr;
  topology_.table = &table_;
  if (layout_.numHosts() == 2) topology_.depth = &depth_.emplace();
  engine().addListener(*this);
  // By the host's name, whether they can share its memory or not: they share its cores.
  engine().noteRanksOnHost(static_cast<int>(std::count_if(
      members_.begin(), members_.end(), [&](const Member& member) { return member.host == members_[rank_].host; })));
}

Communicator::~Communicator() {
  assert(pending_ == nullptr);  // operations in flight keep their communicator
  engine().removeListener(*this);
}

void Communicator::setWatch(std::shared_ptr<GroupWatch> watch) {
  ProgressEngine::Access access(engine());
  watch_ = std::move(watch);
}

void Communicator::setFollower(const std::shared_ptr<Communicator>& other) {
  ProgressEngine::Access access(engine());
  follower_ = other;
  if (!aborted_) tellFollower([status = aborted_](Communicator& follower) { follower.abort(status); });
}

void Communicator::tellFollower(const std::function<void(Communicator&)>& tell) {
  if (follower_.expired()) return;
  engine().defer([follower = follower_, tell] {
    if (const auto there = follower.lock()) tell(*there);
  });
}

std::string Communicator::describePending() {
  std::shared_ptr<Communicator> follower;
  std::string text;
  {
    ProgressEngine::Access access(engine());
    follower = follower_.lock();
    text = describePendingHere();
  }
  return follower == nullptr ? text : text + "; on CUDA " + follower->describePending();
}

std::string Communicator::describePendingHere() const {
  const Operation* oldest = nullptr;
  int count = 0;
  for (const Operation* operation = pending_; operation != nullptr; operation = operation->next_) {
    if (operation->isDone() || operation->isBackground()) continue;
    oldest = operation;
    ++count;
  }
  if (count == 0) return aborted_ ? "nothing is pending" : "the group is over here: " + aborted_.toString();
  return oldest->describe() + oldest->circumstances() +
         (count == 1 ? " is" : " and " + std::to_string(count - 1) + " more are") + " pending";
}

bool Communicator::begin(ProgramOperation& operation) {
  if (turns_.empty()) engine().addPoller(*this);
  if (turns_.empty() || turns_.front() != &operation) turns_.push_back(&operation);
  operation.waitsForTurn_ = turns_.front() != &operation;
  return !operation.waitsForTurn_;
}

void Communicator::end(ProgramOperation& operation) {
  assert(turns_.front() == &operation);
  (void)operation;
  turns_.pop_front();
  if (!turns_.empty()) return;
  engine().removePoller(*this);
  host_->expectRing(false);
}

bool Communicator::poll() {
  bool any = false;
  while (!turns_.empty()) {
    ProgramOperation* const first = turns_.front();
    if (first->waitsForTurn_) {
      first->waitsForTurn_ = false;
    } else if (!first->blocked_ || first->isLost_ || !first->isReady()) {
      break;
    }
    first->run();
    any = true;
    if (!turns_.empty() && turns_.front() == first) break;
  }
  return any;
}

bool Communicator::isReady(bool isAwaited) {
  const auto isNow = [&] {
    const ProgramOperation& first = *turns_.front();
    return first.waitsForTurn_ || (first.blocked_ && !first.isLost_ && first.isReady());
  };
  if (turns_.empty()) return false;
  if (isNow()) return true;
  if (!isAwaited && !isUrgent()) return false;
  host_->expectRing(true);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return isNow();
}

bool Communicator::isUrgent() const { return turns_.size() > 1 || (!turns_.empty() && turns_.front()->isUrgent()); }

std::string Communicator::describe(int rank) const {
  if (rank == kAnySource) return "any rank";
  const Member& member = members_[rank];
  return rankName(rank, member.globalRank, member.host, member.pid);
}

std::string Communicator::nameOf(int rank) const { return rankName(rank, members_[rank].globalRank); }

std::string Communicator::nameOf(const std::vector<int>& ranks) const {
  std::string numbers;
  for (const int rank : ranks) {
    numbers += (numbers.empty() ? "" : ", ") + rankNumber(rank, members_[rank].globalRank);
  }
  return (ranks.size() > 1 ? "ranks " : "rank ") + numbers;
}

std::vector<std::string> Communicator::describeAlgorithms() const {
  std::vector<std::string> lines = table_.describe();
  if (size() == 2 && host_ != nullptr) {
    const bool isCheap = host_->reading() == transport::Reading::kCheap;
    lines.push_back(std::string("this group: reading is ") + (isCheap ? "" : "not ") + "cheap");
  }
  return lines;
}

std::string Communicator::transportOf(int rank) {
  ProgressEngine::Access access(engine());
  const Result<transport::PeerId> peer = peerOf(rank);
  return peer ? access.transport().describe(*peer) : peer.status().toString();
}

Result<transport::PeerId> Communicator::peerOf(int rank) {
  Peer& peer = peers_[rank];
  if (!peer.connected) {
    Result<transport::PeerId> id = connections_.connect(members_[rank].address);
    if (!id) return id;
    peer.id = *id;
    peer.connected = true;
    if (peer.failure) peer.failure = engine().transport().failure(*id);  // it may have come and gone before
  }
  return peer.id;
}

bool Communicator::connectFor(int peer, Message& message) {
  const Result<transport::PeerId> id = peerOf(peer);
  if (id) return true;
  message.finish(id.status());
  return false;
}

void Communicator::send(int peer, p2p::MessageKind kind, std::uint32_t tag, std::uint32_t element, const void* data,
                        std::size_t bytes, Message& message) {
  if (!peers_[peer].connected && !connectFor(peer, message)) return;
  engine().transport().send(peers_[peer].id, p2p::makeTag(members_[peer].group, kind, rank_, tag, element), data, bytes,
                            message);
  if (message.isPending && !peers_[peer].failure) {
    failForLoss(*message.operation, peer, peers_[peer].failure.wrap(describe(peer) + " is gone"));
  }
}

void Communicator::recv(int peer, p2p::MessageKind kind, std::uint32_t tag, std::uint32_t element, void* data,
                        std::size_t bytes, Message& message) {
  const int source = peer == kAnySource ? 0 : peer;
  const std::uint64_t mask = peer == kAnySource ? p2p::kAnySourceMask : p2p::kAnyElementMask;
  transport::PeerId from = transport::kAnyPeer;
  if (peer != kAnySource) {
    if (!peers_[peer].connected && !connectFor(peer, message)) return;
    from = peers_[peer].id;
  } else {
    message.tag = p2p::kNoTag;  // until it is known from whom it comes
  }
  const std::uint64_t wanted = p2p::makeTag(members_[rank_].group, kind, source, tag, element);
  engine().transport().recv(from, wanted, mask, data, bytes, message);
  // What a peer sent before it failed can still be received; nothing more will come.
  if (!message.isPending) return;
  if (peer == kAnySource && areOthersGone()) {
    const int last = rank_ == 0 ? 1 : 0;
    failForLoss(*message.operation, last, peers_[last].failure.wrap("all others are gone, " + describe(last)));
  } else if (peer != kAnySource && !peers_[peer].failure) {
    failForLoss(*message.operation, peer, peers_[peer].failure.wrap(describe(peer) + " is gone"));
  }
}

void Communicator::noteReceived(int rank, std::size_t bytes) {
  if (const Result<transport::PeerId> from = peerOf(rank)) engine().transport().noteReceived(*from, bytes);
}

void Communicator::add(Operation& operation) {
  operation.previous_ = nullptr;
  operation.next_ = pending_;
  if (pending_ != nullptr) pending_->previous_ = &operation;
  pending_ = &operation;
}

void Communicator::remove(Operation& operation) {
  (operation.previous_ != nullptr ? operation.previous_->next_ : pending_) = operation.next_;
  if (operation.next_ != nullptr) operation.next_->previous_ = operation.previous_;
}

}  // namespace farandole::collective
