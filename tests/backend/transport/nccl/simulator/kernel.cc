#include "tests/backend/transport/nccl/simulator/kernel.h"

#include <algorithm>
#include <iterator>

#include "tests/backend/transport/nccl/simulator/clique.h"
#include "tests/backend/transport/nccl/simulator/communicator.h"

namespace farandole::testing {

bool CollectiveCall::matches(const CollectiveCall& other) const {
  return kind == other.kind && count == other.count && dtype == other.dtype && op.matches(other.op) &&
         root == other.root;
}

std::string CollectiveCall::text() const {
  static constexpr const char* kKinds[] = {"allReduce", "broadcast", "reduce", "allGather", "reduceScatter"};
  return std::string(kKinds[static_cast<int>(kind)]) + " count " + std::to_string(count) + " dtype " +
         std::to_string(dtype) + " op " + std::to_string(op.kind) + (op.preMultiplies() ? " premul" : "") + " root " +
         std::to_string(root);
}

std::vector<MessageCall> KernelPlan::with(int peer, bool sends) const {
  std::vector<MessageCall> found;
  std::copy_if(messages.begin(), messages.end(), std::back_inserter(found),
               [=](const MessageCall& call) { return call.peer == peer && call.sends == sends; });
  return found;
}

void Kernel::launched() {
  if (!communicator_.usable()) {
    communicator_.clique->core().violation("kernel", "launched on a communicator that has ended");
    ended_ = true;
    return;
  }
  firstCollective_ = communicator_.collectivesLaunched;
  communicator_.collectivesLaunched += plan_->collectives.size();
  for (const MessageCall& call : plan_->messages) (call.sends ? sends_ : receives_)[call.peer] = 0;
  for (auto& [peer, place] : sends_) place = communicator_.sendsLaunched[peer]++;
  for (auto& [peer, place] : receives_) place = communicator_.receivesLaunched[peer]++;
  openMessages_ = sends_.size() + receives_.size();
  communicator_.pending.push_back(this);
}

bool Kernel::ready() const { return ended_ || (!waiting_ && communicator_.pending.front() == this); }

bool Kernel::step(Lock& lock) {
  if (ended_) return true;
  waiting_ = true;
  Clique& clique = *communicator_.clique;
  if (nextCollective_ < plan_->collectives.size()) {
    clique.arrive(*this, firstCollective_ + nextCollective_);
  } else {
    for (const auto& [peer, place] : sends_) clique.arrive(*this, {communicator_.rank, peer, place}, true);
    for (const auto& [peer, place] : receives_) clique.arrive(*this, {peer, communicator_.rank, place}, false);
  }
  return ended_;
}

std::shared_ptr<Work> Kernel::again(Replay& replay) const { return std::make_shared<Kernel>(communicator_, plan_); }

void Kernel::collectiveDone() {
  ++nextCollective_;
  waiting_ = false;
  endIfDone();
}

void Kernel::messagesDone() {
  --openMessages_;
  endIfDone();
}

void Kernel::endIfDone() {
  if (nextCollective_ < plan_->collectives.size() || openMessages_ > 0) return;
  ended_ = true;
  communicator_.pending.pop_front();  // which is this one
}

}  // namespace farandole::testing
