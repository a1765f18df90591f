// What a Communicator does with the ranks of its host, whose memory it shares.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "backend/collective/communicator.h"
#include "backend/collective/program.h"

namespace farandole::collective {

using transport::ProgressEngine;

namespace {

// Asking costs messages to a store: not while all goes as it should, and then less and less often.
constexpr transport::Clock::duration kFirstAsked = std::chrono::milliseconds(50);
constexpr transport::Clock::duration kLongestUnasked = std::chrono::seconds(1);

// What `look` finds, which is called every 50 us with nothing held, or why there will be nothing; nothing when the time
// is over.
template <typename Look>
std::invoke_result_t<Look> lookUntil(transport::Clock::time_point deadline, const Communicator::Health& health,
                                     const Look& look) {
  transport::Clock::duration pause = kFirstAsked;
  auto askAt = transport::Clock::now() + pause;
  while (true) {
    if (auto found = look()) return found;
    const auto now = transport::Clock::now();
    if (now >= deadline) return std::nullopt;
    if (now >= askAt) {
      FARANDOLE_RETURN_IF_ERROR(health());
      pause = std::min(2 * pause, kLongestUnasked);
      askAt = transport::Clock::now() + pause;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

Status Communicator::connectHost(transport::Clock::time_point deadline, std::size_t windowBytes, const Health& health) {
  const std::vector<int>& here = localRanks();
  if (here.size() == 1) return Status::ok();
  {
    ProgressEngine::Access access(engine());
    for (const int rank : here) {
      if (rank == rank_) continue;
      const Result<transport::PeerId> peer = peerOf(rank);
      if (!peer) return peer.status().wrap(describe(rank));
      hostNeighbours_.push_back({layout_.indexOf(rank), *peer});
    }
  }
  Result<transport::SharedMemory> memory = meetHost(deadline, windowBytes, health);
  if (!memory) {
    return memory.status().wrap("sharing memory among the " + std::to_string(here.size()) + " ranks of host " +
                                members_[rank_].host);
  }
  memory->closeDescriptor();
  auto host =
      std::make_unique<HostSegment>(std::move(memory).value(), layout_.indexOf(rank_), static_cast<int>(here.size()));
  if (Status agreed = agreeOnReading(*host, deadline, health); !agreed) {
    host->abandon(HostSegment::kNobody, agreed.toString());  // some may have agreed, and will wait for this one
    return agreed;
  }
  ProgressEngine::Access access(engine());  // the loop looks at it
  if (!aborted_) return aborted_;
  host_ = std::move(host);
  topology_.segment = host_.get();
  if (host_->size() == 2) topology_.swapWays = &swapWays_.emplace(*host_);
  return Status::ok();
}

// The first rank of the host makes the memory and passes it to the others, who know it by their number for the group.
Result<transport::SharedMemory> Communicator::meetHost(transport::Clock::time_point deadline, std::size_t windowBytes,
                                                       const Health& health) {
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
  auto memory = lookUntil(deadline, health, [&]() -> std::optional<Result<transport::SharedMemory>> {
    ProgressEngine::Access access(engine());
    const Result<transport::PeerId> peer = peerOf(first);
    if (!peer) return peer.status();
    Result<transport::Descriptor> descriptor = access.transport().takeSharedMemory(*peer, members_[rank_].group);
    if (!descriptor) return descriptor.status();
    if (*descriptor) return HostSegment::open(std::move(*descriptor), size);
    FARANDOLE_RETURN_IF_ERROR(access.transport().failure(*peer).wrapUnlessOk(describe(first)));
    return std::nullopt;
  });
  return memory ? *std::move(memory) : Status::timeout(describe(first) + " passed none in time");
}

Status Communicator::agreeOnReading(HostSegment& host, transport::Clock::time_point deadline, const Health& health) {
  const auto readingOf = [&](const Neighbour& other) { return engine().transport().reading(other.peer); };
  const auto outcome = lookUntil(deadline, health, [&]() -> std::optional<Status> {
    ProgressEngine::Access access(engine());
    host.tellReading(readingOf(*std::ranges::min_element(hostNeighbours_, {}, readingOf)));
    if (host.reading() != transport::Reading::kUnknown) return Status::ok();
    for (const int rank : localRanks()) {
      if (rank == rank_) continue;
      FARANDOLE_RETURN_IF_ERROR(access.transport().failure(peers_[rank].id).wrapUnlessOk(describe(rank)));
    }
    return std::nullopt;
  });
  if (outcome) return *outcome;
  int silent = 0;
  while (silent + 1 < host.size() && host.toldBy(silent) != transport::Reading::kUnknown) ++silent;
  return Status::timeout(describe(rankOnHost(silent)) + " has not heard of all other ranks of its host in time");
}

void Communicator::signal(std::uint64_t value) {
  host_->signal(value);
  // Who goes to sleep says so, then looks at the segment; here it is the other way round.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const auto& [index, peer] : hostNeighbours_) {
    if (host_->isRingExpected(index)) engine().transport().nudge(peer);
  }
}

Status Communicator::readFrom(int index, void* to, const void* from, std::size_t bytes) {
  const int rank = rankOnHost(index);
  Status status = engine().transport().readMemory(peers_[rank].id, to, from, bytes);
  // It counts only if the other one had not given up by then, and gone on to use its memory.
  if (Status there = canCome(index); !there) return there;
  if (status.code() != StatusCode::kPeerFailed) return status.wrapUnlessOk("receiving from " + describe(rank));
  noteLost(rank);
  const Status death(StatusCode::kPeerFailed, "its process died");
  reportDeath(rank, death);
  return death.wrap(describe(rank) + " failed");
}

// Before others have come there is nobody to make room for.
bool Communicator::waitsForThisCore() const {
  if (turns_.empty()) return false;
  const int index = turns_.front()->awaitedIndex();
  return index >= 0 && host_->coreOf(index) == sched_getcpu();
}

void Communicator::nudgeHost() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const Neighbour& other : hostNeighbours_) engine().transport().nudge(other.peer);
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

}  // namespace farandole::collective
