// Whom a program waits for, and who may wait for it.
#include <algorithm>
#include <set>
#include <span>
#include <string>

#include "backend/collective/communicator.h"
#include "backend/collective/program.h"

namespace farandole::collective {

int ProgramOperation::missing(const Program::Step& step) const {
  if (step.kind != Program::Kind::kAwait && step.kind != Program::Kind::kMeet) return -1;  // it takes
  const HostSegment& host = *program_.host_;
  const bool isOne = step.peer != Program::kAllRanks;
  for (int index = isOne ? step.peer : 0; index < (isOne ? step.peer + 1 : host.size()); ++index) {
    if (!host.hasCome(index, step.size)) return index;
  }
  return -1;
}

bool ProgramOperation::isReady() const {
  const int index = missing(program_.steps_[next_]);
  return index < 0 || !communicator_->canCome(index);
}

bool ProgramOperation::isUrgent() const {
  if (isWanted() || hasMessagesOut()) return true;
  const auto concernsOthers = [](const Program::Step& step) {
    switch (step.kind) {
      case Program::Kind::kSend:
      case Program::Kind::kRecv:
      case Program::Kind::kWait:
      case Program::Kind::kWaitFor:
      case Program::Kind::kLater:
      case Program::Kind::kSignal:
      case Program::Kind::kTake: return true;
      default: return false;
    }
  };
  const auto left = std::span(program_.steps_).subspan(next_);
  return std::any_of(left.rbegin(), left.rend(), concernsOthers);
}

int ProgramOperation::awaitedIndex() const {
  if (!blocked_ || waitsForTurn_) return -1;
  const Program::Step& step = program_.steps_[next_];
  return step.kind == Program::Kind::kAwait ? missing(step) : -1;
}

std::string ProgramOperation::missingRanks() const {
  std::set<int> ranks;
  if (waitsForTurn_) return {};
  const int index = blocked_ ? missing(program_.steps_[next_]) : -1;
  if (index >= 0) ranks.insert(communicator_->rankOnHost(index));  // else it is blocked no more
  for (int i = 0; i < posted_; ++i) {
    if (messages_[i].isPending) ranks.insert(messages_[i].peer);
  }
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + communicator_->describe(rank);
  return text;
}

}  // namespace farandole::collective
