#pragma once

#include <nccl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/backend/transport/nccl/simulator/communicator.h"
#include "tests/backend/transport/nccl/simulator/resources.h"

namespace farandole::testing {

// A call in which ranks wait for each other on the host.
struct Meeting {
  struct Arrival {
    Communicator* caller = nullptr;  // null while the communicator is made from nothing
    Communicator* created = nullptr;
  };
  std::size_t expected = 0;
  std::string wanted;     // what all must ask for alike
  std::set<int> without;  // ranks that do not come
  std::map<int, Arrival> arrivals;
  bool done = false;
  ncclResult_t result = ncclSuccess;
};

// NCCL's calls that make and end communicators: a method for each member of NcclApi.
class Membership {
 public:
  Membership(Core& core, Communicators& communicators, Resources& resources)
      : core_(core), communicators_(communicators), resources_(resources) {}

  ncclResult_t getUniqueId(ncclUniqueId* id);
  ncclResult_t commInitRankConfig(ncclComm_t* created, int size, ncclUniqueId id, int rank, ncclConfig_t* config);
  ncclResult_t commShrink(ncclComm_t parent, int* excluded, int numExcluded, ncclComm_t* created, ncclConfig_t* config,
                          int flags);
  ncclResult_t commGetAsyncError(ncclComm_t communicator, ncclResult_t* error);
  ncclResult_t commFinalize(ncclComm_t communicator);
  ncclResult_t commDestroy(ncclComm_t communicator);
  ncclResult_t commAbort(ncclComm_t communicator);
  ncclResult_t commRevoke(ncclComm_t communicator, int flags);
  ncclResult_t commWindowRegister(ncclComm_t communicator, void* buffer, std::size_t size, ncclWindow_t* window,
                                  int flags);
  ncclResult_t commWindowDeregister(ncclComm_t communicator, ncclWindow_t window);

  bool graphsStay = false;  // with the lock

 private:
  // What every call here refuses: a group, in which NCCL puts off what it does, and a configuration that does not
  // block.
  ncclResult_t refuse(const ncclConfig_t* config, const char* function);
  // The meeting of this call of a communicator, the same for all of its ranks.
  std::shared_ptr<Meeting> meetingOf(Communicator& communicator, const std::string& function, std::size_t expected);
  // Adds this rank. The last one to come closes the meeting; the others wait for that.
  ncclResult_t meet(Lock& lock, Meeting& meeting, int rank, const Meeting::Arrival& arrival, const std::string& wanted,
                    const Communicator& waiter);
  Communicators::Loss lossIn(const Meeting& meeting, const Communicator& waiter);
  // Makes a clique of those who came, in the order of their ranks.
  void close(Meeting& meeting);
  ncclResult_t finish(ncclResult_t result, Communicator& communicator, ncclComm_t* created);
  ncclResult_t drain(Lock& lock, Communicator& communicator);
  void awaitGraphs(Lock& lock, const Communicator& communicator);

  Core& core_;
  Communicators& communicators_;
  Resources& resources_;
  std::set<std::string> ids_;                                // given out
  std::map<std::string, std::shared_ptr<Meeting>> joining_;  // by id
};

}  // namespace farandole::testing
