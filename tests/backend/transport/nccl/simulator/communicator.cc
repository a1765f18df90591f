#include "tests/backend/transport/nccl/simulator/communicator.h"

#include <algorithm>

#include "tests/backend/transport/nccl/simulator/kernel.h"
#include "tests/backend/transport/nccl/simulator/thread_state.h"

namespace farandole::testing {
namespace {

class Blocked {
 public:
  explicit Blocked(Core& core) : core_(core) {
    ++core_.blocked;
    core_.hosts.notify_all();
  }
  ~Blocked() { --core_.blocked; }
  Blocked(const Blocked&) = delete;
  Blocked& operator=(const Blocked&) = delete;

 private:
  Core& core_;
};

}  // namespace

Communicator& Communicators::create(int rank, int device, const ncclConfig_t* config) {
  auto created = std::make_unique<Communicator>();
  created->rank = rank;
  created->device = device;
  if (config != nullptr && config->commName != nullptr) created->name = config->commName;
  if (config != nullptr && config->maxCTAs != NCCL_CONFIG_UNDEF_INT) created->maxCtas = config->maxCTAs;
  Communicator& communicator = *created;
  known_[communicator.handle()] = std::move(created);
  return communicator;
}

Communicator* Communicators::lookUp(ncclComm_t handle) const {
  const auto found = known_.find(handle);
  return found == known_.end() ? nullptr : found->second.get();
}

ncclResult_t Communicators::find(ncclComm_t handle, const char* function, Communicator*& communicator,
                                 bool evenJoining) {
  if (handle == nullptr) return ncclInvalidArgument;
  communicator = lookUp(handle);
  if (communicator == nullptr) {
    core_.violation(function, "no such communicator");
    return ncclInvalidArgument;
  }
  if (communicator->freed()) {
    core_.violation(function, "the communicator '" + communicator->name + "' of rank " +
                                  std::to_string(communicator->rank) + " was destroyed or aborted");
    return ncclInvalidArgument;
  }
  if (communicator->state == Communicator::State::kJoining && !evenJoining) {
    core_.violation(function, "the communicator is not yet made");
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

ncclResult_t Communicators::asyncError(const Communicator& communicator) const {
  if (communicator.asyncError != ncclSuccess) return communicator.asyncError;
  if (communicator.state == Communicator::State::kJoining) return ncclInProgress;
  return communicator.clique->lost(communicator.rank) ? ncclRemoteError : ncclSuccess;
}

void Communicators::checkDevice(const Communicator& communicator, const char* function) {
  const int current = ThreadState::of(core_).device;
  if (current == communicator.device) return;
  core_.violation(function, "the current device is " + std::to_string(current) + ", the communicator's " +
                                std::to_string(communicator.device));
}

void Communicators::failAll(int device, ncclResult_t error) {
  for (const auto& [handle, communicator] : known_) {
    if (communicator->device == device) communicator->asyncError = error;
  }
}

int Communicators::countLive() const {
  return static_cast<int>(
      std::count_if(known_.begin(), known_.end(), [](const auto& entry) { return !entry.second->freed(); }));
}

bool Communicators::isQuiet(int device) const {
  return std::none_of(known_.begin(), known_.end(), [device](const auto& entry) {
    const Communicator& communicator = *entry.second;
    return communicator.device == device && std::any_of(communicator.pending.begin(), communicator.pending.end(),
                                                        [](const Kernel* kernel) { return kernel->isRunning(); });
  });
}

void Communicators::enter(Lock& lock, Communicator& communicator, const char* function) {
  const bool other = communicator.uses > 0 && communicator.user != std::this_thread::get_id();
  if (other) {
    core_.violation(function, "two threads at once in calls of '" + communicator.name + "', rank " +
                                  std::to_string(communicator.rank));
  }
  communicator.user = std::this_thread::get_id();
  ++communicator.uses;
  lock.unlock();
  std::this_thread::yield();
  lock.lock();
}

void Communicators::leave(Communicator& communicator) { --communicator.uses; }

ncclResult_t Communicators::await(Lock& lock, const Communicator& communicator, const std::function<bool()>& done,
                                  const Loss& loss) {
  if (done()) return ncclSuccess;
  const Blocked blocked(core_);
  std::optional<Clock::time_point> lost;
  while (true) {
    if (core_.ended) return ncclSystemError;
    if (communicator.freed() || communicator.state == Communicator::State::kRevoked) return ncclInternalError;
    if (done()) return ncclSuccess;
    if (!core_.alive(communicator.device)) return ncclSystemError;
    const auto patience = loss();
    if (!patience.has_value()) {
      core_.hosts.wait(lock);
      continue;
    }
    if (!lost.has_value()) lost = Clock::now();
    if (Clock::now() >= *lost + *patience) return ncclRemoteError;
    core_.hosts.wait_until(lock, *lost + *patience);
  }
}

}  // namespace farandole::testing
