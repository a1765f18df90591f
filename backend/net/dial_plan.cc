#include "backend/net/dial_plan.h"

#include <algorithm>

namespace farandole::net {
namespace {

using namespace std::chrono_literals;

constexpr int kRefusedRounds = 3;  // after which a refusal is believed

}  // namespace

DialPlan::DialPlan(std::vector<std::string> hosts, std::chrono::milliseconds silence,
                   std::chrono::milliseconds patience, Time now)
    : hosts_(std::move(hosts)), silenceEnd_(now + silence), patienceEnd_(now + patience) {}

std::variant<DialPlan::Attempt, Status> DialPlan::next(Time now) {
  if (hosts_.empty()) return Status::invalidArgument("no address to connect to");
  if (refusedInRow_ >= kRefusedRounds * static_cast<int>(hosts_.size())) {
    return Status(StatusCode::kPeerFailed, "its process is gone: " + lastFailure_);
  }
  if (now >= (connected_ ? patienceEnd_ : silenceEnd_)) return Status::timeout("cannot be reached: " + lastFailure_);
  const std::size_t round = attempts_ / hosts_.size();
  const bool roundBegins = attempts_ % hosts_.size() == 0;
  Attempt attempt{hosts_[attempts_ % hosts_.size()], 0ms,
                  std::min(500ms * (1 << std::min<std::size_t>(round, 4)), 5000ms)};
  if (round > 0 && roundBegins) attempt.pause = std::min(10ms * (1 << std::min<std::size_t>(round, 6)), 500ms);
  ++attempts_;
  return attempt;
}

void DialPlan::failed(Outcome outcome, const std::string& why) {
  refusedInRow_ = outcome == Outcome::kRefused ? refusedInRow_ + 1 : 0;
  lastFailure_ = why;
}

}  // namespace farandole::net
