#include "backend/c10d/control_watch.h"

#include <chrono>

#include "backend/common/text.h"
#include "backend/net/token_proof.h"

namespace farandole::backend {
namespace {

using namespace std::chrono_literals;

// A process that is stopped does not answer, nor do those behind it in the tree.
constexpr auto kAnswerLimit = 400ms;
constexpr std::size_t kMostAnswers = 32;  // told in one error

// Equal on all ranks, and new with each group.
std::string groupKey(const std::string& token) { return "group-" + hexText(net::proofOf(token, "group").substr(0, 8)); }

}  // namespace

Result<std::shared_ptr<ControlWatch>> ControlWatch::join(std::shared_ptr<ProcessContext> context,
                                                         const std::shared_ptr<collective::Communicator>& communicator,
                                                         const Meeting& meeting,
                                                         std::shared_ptr<const CallCounts> counts) {
  std::shared_ptr<ControlWatch> watch(
      new ControlWatch(std::move(context), communicator, groupKey(meeting.token), std::move(counts)));
  FARANDOLE_RETURN_IF_ERROR(watch->context_->useControlPlane([&](net::ControlPlane& plane) {
    return plane.joinGroup(watch->group_, communicator->rank(), meeting.controls, meeting.token, watch);
  }));
  watch->joined_ = true;
  return watch;
}

ControlWatch::ControlWatch(std::shared_ptr<ProcessContext> context,
                           const std::shared_ptr<collective::Communicator>& communicator, std::string group,
                           std::shared_ptr<const CallCounts> counts)
    : context_(std::move(context)), communicator_(communicator), group_(std::move(group)), counts_(std::move(counts)) {}

void ControlWatch::leave() {
  if (!joined_.exchange(false)) return;
  // Not where the process is about to end: all groups were left then.
  (void)context_->useControlPlane([this](net::ControlPlane& plane) { return plane.leaveGroup(group_); });
}

void ControlWatch::abort(const std::string& reason) {
  if (!joined_) return;
  (void)context_->useControlPlane([&](net::ControlPlane& plane) { return plane.abort(group_, reason); });
}

void ControlWatch::reportDeath(int rank, const std::string& reason) {
  if (!joined_) return;
  (void)context_->useControlPlane([&](net::ControlPlane& plane) { return plane.reportDeath(group_, rank, reason); });
}

void ControlWatch::peerFailed(int rank, const Status& status) {
  if (const auto communicator = communicator_.lock()) communicator->rankFailed(rank, status);
}

void ControlWatch::aborted(int rank, const Status& status) { peerFailed(rank, status); }

std::string ControlWatch::report() {
  const auto communicator = communicator_.lock();
  return "has called " + std::to_string(counts_->collectives) + " collectives and " +
         std::to_string(counts_->pointToPoint) + " point-to-point operations, " +
         (communicator != nullptr ? communicator->describePending() : "and let go of the group");
}

void ControlWatch::ask() {
  {
    std::lock_guard lock(answers_->mutex);
    if (answers_->asked) return;
    answers_->asked = true;
    answers_->latest.clear();
  }
  const auto tell = [answers = answers_](net::GroupAnswers latest) {
    std::lock_guard lock(answers->mutex);
    answers->asked = false;
    answers->latest = std::move(latest);
    answers->arrived.notify_all();
  };
  const Status asked = context_->useControlPlane(
      [&](net::ControlPlane& plane) { return plane.askAllRanks(group_, kAnswerLimit, tell); });
  if (!asked) tell({});
}

bool ControlWatch::hasAnswers() {
  std::lock_guard lock(answers_->mutex);
  return !answers_->asked;
}

void ControlWatch::awaitAnswers() {
  std::unique_lock lock(answers_->mutex);
  answers_->arrived.wait_for(lock, kAnswerLimit + 100ms, [this] { return !answers_->asked; });
}

std::string ControlWatch::answers() {
  const auto communicator = communicator_.lock();
  if (communicator == nullptr) return {};
  std::lock_guard lock(answers_->mutex);
  const net::GroupAnswers& latest = answers_->latest;
  std::string silent;
  std::string text;
  std::size_t told = 0;
  for (std::size_t rank = 0; rank < latest.size(); ++rank) {
    if (!latest[rank].has_value()) {
      silent += (silent.empty() ? "" : ", ") + communicator->describe(static_cast<int>(rank));
    } else if (++told <= kMostAnswers) {
      text += "; " + communicator->nameOf(static_cast<int>(rank)) + " " + *latest[rank];
    }
  }
  if (told > kMostAnswers) text += "; and " + std::to_string(told - kMostAnswers) + " ranks more";
  if (latest.empty()) return "no rank says what it is doing";
  return (silent.empty() ? "all ranks answer" : "no answer from " + silent) + text;
}

}  // namespace farandole::backend
