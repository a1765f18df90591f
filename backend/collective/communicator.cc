#include "backend/collective/communicator.h"

#include <algorithm>
#include <cassert>
#include <ranges>
#include <thread>
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
  return oldest->describe() + (count == 1 ? " is" : " and " + std::to_string(count - 1) + " more are") + " pending";
}

Status Communicator::connectHost(transport::Clock::time_point deadline, std::size_t windowBytes) {
  const std::vector<int>& here = localRanks();
  if (here.size() == 1) return Status::ok();
  {
    ProgressEngine::Access access(engine());
    for (const int rank : here) {
      if (rank == rank_) continue;
      const Result<transport::PeerId> peer = peerOf(rank);
      if (!peer) return peer.status().wrap(describe(rank));
      hostNeighbours_.push_back(*peer);
    }
  }
  Result<transport::SharedMemory> memory = meetHost(deadline, windowBytes);
  if (!memory) {
    return memory.status().wrap("sharing memory among the " + std::to_string(here.size()) + " ranks of host " +
                                members_[rank_].host);
  }
  memory->closeDescriptor();
  auto host =
      std::make_unique<HostSegment>(std::move(memory).value(), layout_.indexOf(rank_), static_cast<int>(here.size()));
  FARANDOLE_RETURN_IF_ERROR(agreeOnReading(*host, deadline));
  ProgressEngine::Access access(engine());  // the loop looks at it
  if (!aborted_) return aborted_;
  host_ = std::move(host);
  topology_.segment = host_.get();
  return Status::ok();
}

// The first rank of the host makes the memory and passes it to the others, who know it by their number for the group.
Result<transport::SharedMemory> Communicator::meetHost(transport::Clock::time_point deadline, std::size_t windowBytes) {
  const std::vector<int>& here = localRanks();
  const int size = static_cast<int>(here.size());
  const int first = here[0];
  if (rank_ == first) {
    Result<transport::SharedMemory> memory = HostSegment::create(size, windowBytes);
    for (std::size_t i = 1; memory && i < here.size(); ++i) {
      ProgressEngine::Access access(engine());
      const Result<transport::PeerId> peer = peerOf(here[i]);
      if (!peer) return peer.status();
      FARANDOLE_RETURN_IF_ERROR(access.transport()
                                    .shareMemory(*peer, members_[here[i]].group, memory->descriptor())
                                    .wrapUnlessOk(describe(here[i])));
    }
    return memory;
  }
  while (transport::Clock::now() < deadline) {
    {
      ProgressEngine::Access access(engine());
      const Result<transport::PeerId> peer = peerOf(first);
      if (!peer) return peer.status();
      transport::Descriptor descriptor = access.transport().takeSharedMemory(*peer, members_[rank_].group);
      if (descriptor) return HostSegment::open(std::move(descriptor), size);
      FARANDOLE_RETURN_IF_ERROR(access.transport().failure(*peer).wrapUnlessOk(describe(first)));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return Status::timeout(describe(first) + " passed none in time");
}

Status Communicator::agreeOnReading(HostSegment& host, transport::Clock::time_point deadline) {
  const auto readingOf = [&](transport::PeerId peer) { return engine().transport().reading(peer); };
  while (transport::Clock::now() < deadline) {
    {
      ProgressEngine::Access access(engine());
      host.tellReading(std::ranges::min(hostNeighbours_ | std::views::transform(readingOf)));
      if (host.reading() != transport::Reading::kUnknown) return Status::ok();
      for (const int rank : localRanks()) {
        if (rank == rank_) continue;
        FARANDOLE_RETURN_IF_ERROR(access.transport().failure(peers_[rank].id).wrapUnlessOk(describe(rank)));
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  int silent = 0;
  while (silent + 1 < host.size() && host.toldBy(silent) != transport::Reading::kUnknown) ++silent;
  return Status::timeout(describe(rankOnHost(silent)) + " has not heard of all other ranks of its host in time");
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
  if (turns_.empty()) engine().removePoller(*this);
}

void Communicator::signal(std::uint64_t value) {
  host_->signal(value);
  nudgeHost();
}

Status Communicator::readFrom(int index, void* to, const void* from, std::size_t bytes) {
  const int rank = rankOnHost(index);
  Status status = engine().transport().readMemory(peers_[rank].id, to, from, bytes);
  // It counts only if the other one had not given up by then, and gone on to use its memory.
  if (Status there = canCome(index); !there) return there;
  if (status.code() != StatusCode::kPeerFailed) return status.wrapUnlessOk("receiving from " + describe(rank));
  noteLost(rank);
  return Status(StatusCode::kPeerFailed, "its process died").wrap(describe(rank) + " failed");
}

void Communicator::nudgeHost() {
  for (const transport::PeerId peer : hostNeighbours_) engine().transport().nudge(peer);
}

Status Communicator::canCome(int index) const {
  // Before whether it aborted: who does so gives up afterwards.
  const bool isAbandoned = host_->isAbandoned(index);
  if (const int by = host_->abortedBy(); by != HostSegment::kNobody) return abortOf(by);
  const int rank = rankOnHost(index);
  // Asked with every look at who has not come yet: nothing is described for nobody.
  if (!isAbandoned) return peers_[rank].failure ? Status::ok() : peers_[rank].failure.wrap(describe(rank) + " is gone");
  // Why it gave up, also when it has left since. It may have seen a death before this rank did: the dead one is to be
  // named.
  const int culprit = host_->culpritOf(index);
  if (culprit == HostSegment::kNobody) {
    return Status::aborted(describe(rank) + " has left or given up the group: " + host_->reasonOf(index));
  }
  return deathSeen().wrap(describe(culprit) + " failed");
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

bool Communicator::isReady() const {
  if (turns_.empty()) return false;
  const ProgramOperation& first = *turns_.front();
  return first.waitsForTurn_ || (first.blocked_ && !first.isLost_ && first.isReady());
}

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
    failForLoss(*message.operation, peers_[peer].failure.wrap(describe(peer) + " is gone"));
  }
}

void Communicator::recv(int peer, p2p::MessageKind kind, std::uint32_t tag, std::uint32_t element, void* data,
                        std::size_t bytes, Message& message) {
  const int source = peer == kAnySource ? 0 : peer;
  // A collective's messages have no element: their program says what they are made of.
  const std::uint64_t mask = peer == kAnySource                        ? p2p::kAnySourceMask
                             : kind == p2p::MessageKind::kPointToPoint ? p2p::kAnyElementMask
                                                                       : p2p::kExactMask;
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
  if (message.isPending && peer != kAnySource && !peers_[peer].failure) {
    failForLoss(*message.operation, peers_[peer].failure.wrap(describe(peer) + " is gone"));
  }
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
