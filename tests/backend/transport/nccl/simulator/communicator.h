#pragma once

#include <nccl.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/backend/transport/nccl/simulator/clique.h"
#include "tests/backend/transport/nccl/simulator/core.h"

namespace farandole::testing {

// One rank's handle. It lives to the end of the cluster, so that a late use is known.
struct Communicator {
  enum class State : unsigned char { kJoining, kLive, kRevoked, kFinalized, kDestroyed, kAborted };

  ncclComm_t handle() { return reinterpret_cast<ncclComm_t>(this); }
  bool usable() const { return state == State::kLive || state == State::kFinalized; }
  bool freed() const { return state == State::kDestroyed || state == State::kAborted; }

  State state = State::kJoining;
  int rank = 0;
  int device = 0;
  std::string name;
  int maxCtas = 0;
  std::shared_ptr<Clique> clique;  // null while it is joining
  ncclResult_t asyncError = ncclSuccess;

  std::deque<Kernel*> pending;  // launched and not ended, in order
  std::uint64_t collectivesLaunched = 0;
  std::map<int, std::uint64_t> sendsLaunched, receivesLaunched;  // by peer
  std::map<std::string, std::uint64_t> meetings;                 // by function
  int captured = 0;                                              // launches that are in a graph

  std::thread::id user;  // the thread inside of a call, or between the ends of a group that uses it
  int uses = 0;
};

// All communicators, and who is inside of them. With the lock.
class Communicators {
 public:
  explicit Communicators(Core& core) : core_(core) {}

  Communicator& create(int rank, int device, const ncclConfig_t* config);
  // Null where there is none; says nothing.
  Communicator* lookUp(ncclComm_t handle) const;
  // What a function does first: the handle's communicator, or what to return. Freed and unknown handles are violations.
  ncclResult_t find(ncclComm_t handle, const char* function, Communicator*& communicator, bool evenJoining = false);
  ncclResult_t asyncError(const Communicator& communicator) const;
  void checkDevice(const Communicator& communicator, const char* function);
  void failAll(int device, ncclResult_t error);
  int countLive() const;
  // No kernel on the device waits for other ranks.
  bool isQuiet(int device) const;

  // A thread is in `function`: two at once are a violation. Lets go of the lock for a moment, in which they would meet.
  void enter(Lock& lock, Communicator& communicator, const char* function);
  void leave(Communicator& communicator);

  // Blocks until `done`. `loss` says how long to go on although it will never be, when that is so. Then, or when the
  // communicator or the cluster ends, what NCCL returns.
  using Loss = std::function<std::optional<std::chrono::milliseconds>()>;
  ncclResult_t await(Lock& lock, const Communicator& communicator, const std::function<bool()>& done, const Loss& loss);

 private:
  Core& core_;
  std::map<ncclComm_t, std::unique_ptr<Communicator>> known_;
};

constexpr std::chrono::milliseconds kLossNotice{50};

// One call of a communicator by one thread.
class Use {
 public:
  Use(Communicators& all, Lock& lock, Communicator& communicator, const char* function)
      : all_(all), communicator_(communicator) {
    all_.enter(lock, communicator_, function);
  }
  ~Use() { all_.leave(communicator_); }  // with the lock
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  Communicators& all_;
  Communicator& communicator_;
};

}  // namespace farandole::testing
