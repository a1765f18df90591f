// How a communicator's operations end when they cannot go on: aborts, deaths, losses, timeouts.
#include <algorithm>
#include <utility>

#include "backend/collective/communicator.h"
#include "backend/collective/program.h"
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

void Communicator::abort(const Status& status) {
  ProgressEngine::Access access(engine());
  failAll(status);
  isReasonKnown_ = true;
}

Operation* Communicator::heldCollective() {
  ProgressEngine::Access access(engine());
  if (!aborted_) return nullptr;
  for (Operation* operation = pending_; operation != nullptr; operation = operation->next_) {
    if (operation->isDone() || dynamic_cast<ProgramOperation*>(operation) == nullptr) continue;
    operation->retain();
    return operation;
  }
  return nullptr;
}

void Communicator::finishCollectives(transport::Clock::time_point deadline) {
  bool isInTime = true;
  while (isInTime) {
    Operation* const operation = heldCollective();
    if (operation == nullptr) return;
    isInTime = operation->wait(deadline);
    operation->release();
  }
}

void Communicator::abortAll(const Status& status) {
  ProgressEngine::Access access(engine());
  // Before this rank gives up, and wakes the others: an abort is told as one.
  if (host_ != nullptr && aborted_) host_->abort(rank_, status.toString());
  failAll(status);
  isReasonKnown_ = true;
}

void Communicator::rankFailed(int rank, const Status& status) {
  ProgressEngine::Access access(engine());
  // The others of this host hear it as well, with the reason, which a word in the segment would lack.
  const int culprit = status.code() == StatusCode::kPeerFailed ? rank : HostSegment::kNobody;
  failAll(status, culprit);
  // Once what is pending has ended with the reason.
  if (status.code() == StatusCode::kPeerFailed) {
    peers_[rank].failure = deathSeen();
    drop(rank, deathSeen());
  }
  if (std::exchange(isReasonKnown_, true)) return;
  // What ended the group before, a broken connection or a rank that gave up, followed from this.
  aborted_ = status;
  if (host_ != nullptr) host_->abandon(culprit, status.toString());
}

int Communicator::culpritOf(const Status& status) const {
  // Between hosts a broken connection does not tell a death from a farewell; the watch will.
  const bool isLoss =
      status.code() == StatusCode::kPeerFailed || (status.code() == StatusCode::kPeerLeft && watch_ != nullptr);
  return isLoss ? lost_ : HostSegment::kNobody;
}

void Communicator::giveUp(const Status& status) {
  if (aborted_) host_->abandon(culpritOf(status), status.toString());
}

void Communicator::abandon(const Status& status) {
  if (!aborted_) return;  // that is what this rank gave up for
  // A death the watch knows, and names, itself.
  if (watch_ != nullptr && status.code() != StatusCode::kPeerFailed) watch_->abort(status.toString());
  failAll(status, culpritOf(status));
}

std::vector<Communicator::Gone> Communicator::gone() {
  ProgressEngine::Access access(engine());
  std::vector<Gone> gone;
  for (int rank = 0; rank < size(); ++rank) {
    const Status& failure = peers_[rank].failure;
    // A connection to another host that broke may yet be made again.
    const bool isHere = !members_[rank].hostIdentity.empty() && layout_.hostOf(rank) == layout_.hostOf(rank_);
    const bool isEnd = failure.code() == StatusCode::kPeerFailed || (failure.code() == StatusCode::kPeerLeft && isHere);
    if (isEnd) gone.push_back({members_[rank], failure});
  }
  if (watch_ != nullptr) {
    for (const int rank : watch_->departed()) gone.push_back({members_[rank], transport::processLeft()});
  }
  return gone;
}

Status Communicator::deathSeen() const {
  return {StatusCode::kPeerFailed, watch_ == nullptr ? "its process died" : "its process died, or cannot be reached"};
}

void Communicator::drop(int rank, const Status& why) {
  if (rank != rank_ && peers_[rank].connected) connections_.drop(peers_[rank].id, why);
  tellFollower([rank, why](Communicator& follower) {
    ProgressEngine::Access access(follower.engine());
    follower.drop(rank, why);
  });
}

Status Communicator::abortOf(int rank) const {
  return Status::aborted(describe(rank) + " aborted the group: " + host_->reasonOf(layout_.indexOf(rank)));
}

bool Communicator::lookAround() {
  if (host_ == nullptr || !aborted_) return false;
  if (host_->abortedBy() == HostSegment::kNobody) return false;
  failAll(abortOf(host_->abortedBy()));
  return true;
}

void Communicator::failAll(const Status& status, int culprit) {
  if (!aborted_) return;
  aborted_ = status;
  if (host_ != nullptr) {
    host_->abandon(culprit, status.toString());
    if (!turns_.empty()) engine().removePoller(*this);
    turns_.clear();
    nudgeHost();
  }
  failPending([&](Operation&) { return status; });
  settleLosses(true);
  closeToMessages();
  tellFollower([status](Communicator& follower) { follower.abort(status); });
}

void Communicator::closeToMessages() {
  std::vector<std::string_view> addresses;
  addresses.reserve(members_.size());
  for (const Member& member : members_) addresses.emplace_back(member.address);
  engine().transport().closeGroup(members_[rank_].group, addresses);
}

Status Communicator::whyClosed(int rank, const Status& status) const {
  if (rank == kAnySource || host_ == nullptr || layout_.hostOf(rank) != layout_.hostOf(rank_)) return status;
  if (!peers_[rank].failure) return status;  // its connection tells
  const Status why = canCome(layout_.indexOf(rank));
  return why ? status : why;
}

// With a watch its word comes first.
Status Communicator::toldDeath() const {
  if (host_ == nullptr || watch_ != nullptr) return Status::ok();
  for (int index = 0; index < host_->size(); ++index) {
    if (host_->isAbandoned(index) && host_->culpritOf(index) != HostSegment::kNobody) return canCome(index);
  }
  return Status::ok();
}

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

std::string Communicator::answers() const {
  std::string text = watch_->answers();
  return text.empty() ? text : "; " + text;
}

Status Communicator::timeoutOf(const Operation& operation, std::string text, const std::string& others) {
  if (const std::string missing = operation.missingRanks(); !missing.empty()) text += ", waits for " + missing;
  return Status::timeout(text + others);
}

std::string Communicator::askOthers(const Operation& operation) {
  if (watch_ == nullptr || operation.isDone()) return "";
  watch_->ask();
  watch_->awaitAnswers();
  return answers();
}

Status Communicator::latenessOf(const Operation& operation, std::chrono::milliseconds timeout) {
  const std::string others = askOthers(operation);
  ProgressEngine::Access access(engine());
  if (operation.isDone()) return Status::ok();
  const std::string text = "not done after the timeout of wait(), " + std::to_string(timeout.count()) + " ms";
  return timeoutOf(operation, text + "; it goes on", others).wrap(operation.describe());
}

void Communicator::timeOut(Operation& operation, std::chrono::milliseconds timeout) {
  const std::string others = askOthers(operation);
  ProgressEngine::Access access(engine());
  if (operation.isDone()) return;
  operation.fail(
      timeoutOf(operation, "not done after its timeout of " + std::to_string(timeout.count()) + " ms", others));
}

void Communicator::failPending(const std::function<Status(Operation&)>& select) {
  // Failing one may complete and remove it, and it alone.
  for (Operation* operation = pending_; operation != nullptr;) {
    Operation* const next = operation->next_;
    if (!operation->isDone()) {
      if (Status status = select(*operation); !status) operation->fail(status);
    }
    operation = next;
  }
}

void Communicator::peerFailed(transport::PeerId id, const Status& status) {
  lookAround();
  for (int rank = 0; rank < size(); ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.connected || peer.id != id) continue;
    peer.failure = status;
    // One that has left the group before may end as it likes.
    const bool isHere = host_ != nullptr && layout_.hostOf(rank) == layout_.hostOf(rank_);
    const bool hasLeft = isHere && host_->isAbandoned(layout_.indexOf(rank));
    noteLost(rank);
    // Before this rank can leave for it: the others would take that for the reason.
    if (status.code() == StatusCode::kPeerFailed && isHere && !hasLeft) reportDeath(rank, status);
    // Where there is a watch, its word follows: it can tell that the rank has left.
    if (status.code() == StatusCode::kPeerFailed && !hasLeft && watch_ == nullptr) {
      failAll(status.wrap(describe(rank) + " failed"), rank);
      continue;
    }
    for (Operation* operation : waitingFor(rank)) {
      failForLoss(*operation, rank, status.wrap(describe(rank) + " is gone"));
    }
    tellFollower([rank, status](Communicator& follower) { follower.noteDeparture(rank, status); });
  }
}

void Communicator::reportDeath(int rank, const Status& status) {
  if (watch_ != nullptr) watch_->reportDeath(rank, std::string(status.message()));
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

void Communicator::checkDeadlines(transport::Clock::time_point now) {
  // With a watch they end once the others have been asked what they are doing.
  const bool wasTold = asked_ && watch_->hasAnswers();
  bool isOverdue = false;
  failPending([&](Operation& operation) {
    if (now < operation.deadline()) return Status::ok();
    constexpr const char* kText = "not done when its timeout came";
    if (watch_ == nullptr) return timeoutOf(operation, kText, "");
    if (wasTold) return timeoutOf(operation, kText, answers());
    isOverdue = true;
    return Status::ok();
  });
  settleLosses(false);
  settleDepartures();
  if (aborted_) settleLeavers();
  if (isOverdue && !asked_) watch_->ask();
  asked_ = !wasTold && (asked_ || isOverdue);
}

}  // namespace farandole::collective
