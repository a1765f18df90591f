#include "tests/backend/transport/nccl/simulator/membership.h"

#include <algorithm>
#include <cstring>

#include "tests/backend/transport/nccl/simulator/thread_state.h"

namespace farandole::testing {
namespace {

// The headers of 2.28 do not name it.
const unsigned kConfigMagic = [] {
  const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  return config.magic;
}();

// How long a rank waits for one that may be another than the dead one.
constexpr std::chrono::milliseconds kDoubt{1000};

std::string textOf(const ncclUniqueId& id) { return std::string(id.internal, sizeof(id.internal)); }

}  // namespace

ncclResult_t Membership::refuse(const ncclConfig_t* config, const char* function) {
  const bool unset = config != nullptr && (config->magic != kConfigMagic || config->maxCTAs == 0 ||
                                           (config->maxCTAs < 0 && config->maxCTAs != NCCL_CONFIG_UNDEF_INT));
  if (unset) {
    core_.violation(function, "the configuration was not initialized, or maxCTAs is not positive");
    return ncclInvalidArgument;
  }
  const bool inGroup = ThreadState::of(core_).group.depth > 0;
  const bool deferred = config != nullptr && config->blocking == 0;
  if (!inGroup && !deferred) return ncclSuccess;
  ThreadState::of(core_).lastNcclError = "not simulated";
  core_.violation(function, inGroup ? "not simulated in a group" : "not simulated without blocking");
  return ncclInvalidUsage;
}

ncclResult_t Membership::getUniqueId(ncclUniqueId* id) {
  const std::lock_guard lock(core_.mutex);
  std::memset(id->internal, 0, sizeof(id->internal));
  const std::string text = std::to_string(core_.serial) + "." + std::to_string(ids_.size());
  std::memcpy(id->internal, text.data(), text.size());
  ids_.insert(textOf(*id));
  return ncclSuccess;
}

ncclResult_t Membership::commInitRankConfig(ncclComm_t* created, int size, ncclUniqueId id, int rank,
                                            ncclConfig_t* config) {
  Lock lock(core_.mutex);
  if (const ncclResult_t result = refuse(config, "ncclCommInitRankConfig"); result != ncclSuccess) return result;
  if (created == nullptr || size < 1 || rank < 0 || rank >= size) return ncclInvalidArgument;
  if (ids_.count(textOf(id)) == 0) {
    core_.violation("ncclCommInitRankConfig", "this id is not of ncclGetUniqueId");
    return ncclInvalidArgument;
  }
  std::shared_ptr<Meeting>& slot = joining_[textOf(id)];
  if (slot == nullptr) slot = std::make_shared<Meeting>();
  const std::shared_ptr<Meeting> meeting = slot;
  if (meeting->done) {
    core_.violation("ncclCommInitRankConfig", "this id was used up");
    return ncclInvalidArgument;
  }
  if (meeting->arrivals.empty()) meeting->expected = static_cast<std::size_t>(size);
  Communicator& communicator = communicators_.create(rank, ThreadState::of(core_).device, config);
  *created = communicator.handle();  // now, so that another thread can abort it
  const Use use(communicators_, lock, communicator, "ncclCommInitRankConfig");
  const ncclResult_t result = meet(lock, *meeting, rank, {nullptr, &communicator}, std::to_string(size), communicator);
  return finish(result, communicator, created);
}

ncclResult_t Membership::commShrink(ncclComm_t handle, int* excluded, int numExcluded, ncclComm_t* created,
                                    ncclConfig_t* config, int flags) {
  constexpr int kAbortsFirst = 1;  // NCCL_SHRINK_ABORT, which older headers lack
  Lock lock(core_.mutex);
  if (const ncclResult_t result = refuse(config, "ncclCommShrink"); result != ncclSuccess) return result;
  Communicator* parent = nullptr;
  if (const auto result = communicators_.find(handle, "ncclCommShrink", parent); result != ncclSuccess) return result;
  const Use use(communicators_, lock, *parent, "ncclCommShrink");
  communicators_.checkDevice(*parent, "ncclCommShrink");
  if (created == nullptr || excluded == nullptr || numExcluded <= 0) return ncclInvalidArgument;
  std::set<int> without(excluded, excluded + numExcluded);
  if (without.count(parent->rank) > 0) {
    core_.violation("ncclCommShrink", "called by an excluded rank");
    return ncclInvalidUsage;
  }
  if ((flags & kAbortsFirst) != 0) {
    parent->clique->endKernels(parent->rank);
    core_.changed();
  } else if (!parent->pending.empty()) {
    core_.violation("ncclCommShrink", "kernels of the parent still run, and it was not told to abort them");
  }
  std::string wanted;
  for (const int rank : without) wanted += std::to_string(rank) + " ";
  const auto expected = static_cast<std::size_t>(parent->clique->size()) - without.size();
  const auto meeting = meetingOf(*parent, "ncclCommShrink", expected);
  meeting->without = without;
  Communicator& communicator = communicators_.create(-1, parent->device, config);
  if (communicator.name.empty()) communicator.name = parent->name;
  *created = communicator.handle();
  const Meeting::Arrival arrival{parent, &communicator};
  return finish(meet(lock, *meeting, parent->rank, arrival, wanted, communicator), communicator, created);
}

std::shared_ptr<Meeting> Membership::meetingOf(Communicator& communicator, const std::string& function,
                                               std::size_t expected) {
  std::shared_ptr<Meeting>& slot = communicator.clique->meetings[{function, communicator.meetings[function]++}];
  if (slot == nullptr) slot = std::make_shared<Meeting>();
  if (slot->arrivals.empty()) slot->expected = expected;
  return slot;
}

ncclResult_t Membership::meet(Lock& lock, Meeting& meeting, int rank, const Meeting::Arrival& arrival,
                              const std::string& wanted, const Communicator& waiter) {
  if (meeting.arrivals.empty()) meeting.wanted = wanted;
  const bool sameDevice = arrival.caller == nullptr &&
                          std::any_of(meeting.arrivals.begin(), meeting.arrivals.end(), [&](const auto& other) {
                            return other.second.created->device == arrival.created->device;
                          });
  if (meeting.wanted != wanted || meeting.arrivals.count(rank) > 0) {
    meeting.result = ncclInvalidArgument;
  } else if (sameDevice) {
    meeting.result = ncclInvalidUsage;
  }
  meeting.arrivals.insert({rank, arrival});
  if (meeting.result != ncclSuccess) meeting.done = true;
  if (!meeting.done && meeting.arrivals.size() == meeting.expected) close(meeting);
  core_.changed();
  const ncclResult_t waited = communicators_.await(
      lock, waiter, [&] { return meeting.done; }, lossIn(meeting, waiter));
  return waited != ncclSuccess ? waited : meeting.result;
}

Communicators::Loss Membership::lossIn(const Meeting& meeting, const Communicator& waiter) {
  return [this, &meeting, &waiter]() -> std::optional<std::chrono::milliseconds> {
    std::vector<bool> here(core_.killed.size());
    bool fromNothing = false;
    for (const auto& [rank, arrival] : meeting.arrivals) {
      const Communicator& member = arrival.caller != nullptr ? *arrival.caller : *arrival.created;
      if (!core_.alive(member.device) || member.freed()) return kLossNotice;
      here[static_cast<std::size_t>(member.device)] = true;
      fromNothing = arrival.caller == nullptr;
      if (arrival.caller == nullptr) continue;
      const auto& ranks = member.clique->members();
      const auto left = std::count_if(ranks.begin(), ranks.end(), [&](const Communicator* other) {
        return core_.alive(other->device) && !other->freed() && meeting.without.count(other->rank) == 0;
      });
      if (static_cast<std::size_t>(left) < meeting.expected) return kLossNotice;
    }
    if (!fromNothing) return std::nullopt;
    std::size_t couldCome = 0;
    bool dead = false;
    for (int device = 0; device < core_.numDevices(); ++device) {
      if (!core_.alive(device)) dead = true;
      if (core_.alive(device) && !here[static_cast<std::size_t>(device)]) ++couldCome;
    }
    if (!dead) return std::nullopt;
    return meeting.expected - meeting.arrivals.size() > couldCome ? kLossNotice : kDoubt;
  };
}

void Membership::close(Meeting& meeting) {
  std::vector<Communicator*> members;
  for (const auto& [rank, arrival] : meeting.arrivals) {
    if (arrival.created == nullptr) continue;
    arrival.created->rank = static_cast<int>(members.size());
    members.push_back(arrival.created);
  }
  if (!members.empty()) {
    const auto clique = std::make_shared<Clique>(core_, members[0]->name, members);
    for (Communicator* communicator : members) {
      communicator->clique = clique;
      if (communicator->state == Communicator::State::kJoining) communicator->state = Communicator::State::kLive;
    }
  }
  meeting.done = true;
}

ncclResult_t Membership::finish(ncclResult_t result, Communicator& communicator, ncclComm_t* created) {
  if (result == ncclSuccess) return result;
  communicator.state = Communicator::State::kAborted;
  *created = nullptr;
  core_.changed();
  return result;
}

}  // namespace farandole::testing
