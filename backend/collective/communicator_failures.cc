// How a communicator's operations end when they cannot go on: aborts, deaths, timeouts.
#include <utility>

#include "backend/collective/communicator.h"
#include "backend/collective/program.h"
#include "backend/transport/departure.h"

namespace farandole::collective {

using transport::ProgressEngine;

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
