// How a communicator's operations end that wait for ranks that are gone: whose connection broke, or who has left.
#include <algorithm>

#include "backend/collective/communicator.h"
#include "backend/transport/departure.h"

namespace farandole::collective {

using transport::ProgressEngine;

namespace {

// Looks at the deadlines, four a second, for which a lost connection's reason is waited for.
constexpr int kLooksForReason = 3;
// And for which what a rank of another host has sent, when it leaves the group, may be on its way: some MB that are in
// sockets, through a slow link.
constexpr int kLooksBetweenHosts = 20;

}  // namespace

void Communicator::failForLoss(Operation& operation, int rank, const Status& status) {
  // A rank that aborted the group is the reason, and not who has left since; so is one whose death made others leave.
  if (lookAround()) return operation.fail(aborted_);
  if (const Status death = toldDeath(); !death) return operation.fail(death);
  if (watch_ == nullptr || !aborted_) return operation.fail(status);
  operation.isLost_ = true;
  ++operation.outstanding_;
  losses_.push_back({&operation, rank, status});
}

void Communicator::settleLosses(bool all) {
  if (losses_.empty()) return;
  const std::vector<int> departed = watch_->departed();
  std::vector<Loss> due;
  std::erase_if(losses_, [&](Loss& loss) {
    // Its connections end with it: that one broke is not the reason.
    const bool hasLeft = std::ranges::find(departed, loss.rank) != departed.end();
    if (hasLeft) loss.status = transport::processLeft().wrap(describe(loss.rank) + " is gone");
    const bool isDue = all || hasLeft || ++loss.looks >= kLooksForReason;
    if (isDue) due.push_back(loss);
    return isDue;
  });
  for (const Loss& loss : due) {
    loss.operation->fail(loss.status);
    if (--loss.operation->outstanding_ == 0) loss.operation->run();
  }
}

void Communicator::noteDeparture(int rank, const Status& status) {
  ProgressEngine::Access access(engine());
  departures_.push_back({rank, status});
}

void Communicator::noteLeavers() {
  const auto isNoted = [this](int rank) { return std::ranges::find(leavers_, rank, &Leaver::rank) != leavers_.end(); };
  if (host_ != nullptr) {
    for (const Neighbour& other : hostNeighbours_) {
      // Who has given up for a death is not the reason: that is told.
      if (!host_->isAbandoned(other.index) || host_->culpritOf(other.index) != HostSegment::kNobody) continue;
      const int rank = rankOnHost(other.index);
      if (isNoted(rank)) continue;
      leavers_.push_back({rank, "it has left or given up the group: " + host_->reasonOf(other.index), 0});
    }
  }
  if (watch_ == nullptr) return;
  for (const int rank : watch_->left()) {
    if (!isNoted(rank)) leavers_.push_back({rank, "it has left the group", kLooksBetweenHosts});
  }
}

void Communicator::settleLeavers() {
  noteLeavers();
  ++looks_;
  for (Leaver& leaver : leavers_) {
    if (leaver.looks > 0) {
      --leaver.looks;
      continue;
    }
    for (Operation* operation : waitingFor(leaver.rank)) {
      if (operation->waitsSince_ == 0) operation->waitsSince_ = looks_;
      if (looks_ - operation->waitsSince_ < kLooksForReason) continue;
      operation->fail(Status::aborted(leaver.why).wrap(describe(leaver.rank) + " is gone"));
    }
  }
}

void Communicator::settleDepartures() {
  std::vector<Departure> due;
  std::erase_if(departures_, [&](Departure& departure) {
    const bool isDue = ++departure.looks >= kLooksForReason;
    if (isDue) due.push_back(departure);
    return isDue;
  });
  for (const auto& [rank, status, looks] : due) {
    if (peers_[rank].failure) peers_[rank].failure = status;
    for (Operation* operation : waitingFor(rank)) operation->fail(status.wrap(describe(rank) + " is gone"));
  }
}

bool Communicator::areOthersGone() const {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_ && peers_[rank].failure) return false;
  }
  return size() > 1;
}

bool Communicator::canNobodySend() const {
  for (int rank = 0; rank < size(); ++rank) {
    const auto hasLeft = [rank](const Leaver& leaver) { return leaver.rank == rank && leaver.looks == 0; };
    if (rank != rank_ && peers_[rank].failure && std::ranges::none_of(leavers_, hasLeft)) return false;
  }
  return size() > 1;
}

std::vector<Operation*> Communicator::waitingFor(int rank) {
  std::vector<Operation*> waiting;
  const bool isLast = canNobodySend();
  for (Operation* operation = pending_; operation != nullptr; operation = operation->next_) {
    const std::span<const Message> messages = operation->messages();
    const auto waitsForIt = [rank, isLast](const Message& message) {
      return message.isPending && (message.peer == rank || (message.peer == kAnySource && isLast));
    };
    if (!operation->isDone() && std::ranges::any_of(messages, waitsForIt)) waiting.push_back(operation);
  }
  return waiting;
}

}  // namespace farandole::collective
