#pragma once

#include <atomic>
#include <memory>

#include "tests/backend/transport/nccl/simulator/communicator.h"
#include "tests/backend/transport/nccl/simulator/core.h"
#include "tests/backend/transport/nccl/simulator/cuda_functions.h"
#include "tests/backend/transport/nccl/simulator/data_calls.h"
#include "tests/backend/transport/nccl/simulator/faults.h"
#include "tests/backend/transport/nccl/simulator/journal.h"
#include "tests/backend/transport/nccl/simulator/membership.h"
#include "tests/backend/transport/nccl/simulator/resources.h"
#include "tests/backend/transport/nccl/simulator/streams.h"

namespace farandole::testing {

// NCCL's side, with a method for each member of NcclApi that needs the cluster.
class NcclFunctions : public DataCalls, public Membership, public Resources {
 public:
  NcclFunctions(Core& core, Streams& streams, Communicators& communicators)
      : DataCalls(core, streams, communicators, *this),
        Membership(core, communicators, *this),
        Resources(core, communicators),
        core_(core) {}

  ncclResult_t getVersion(int* version) const {
    *version = newer ? 23007 : 22703;
    return ncclSuccess;
  }

  const char* getErrorString(ncclResult_t result) const;
  const char* getLastError(ncclComm_t) const { return ThreadState::of(core_).lastNcclError.c_str(); }

  std::atomic<bool> newer{true};

 private:
  Core& core_;
};

// The parts of a cluster. Calls hold it, so that one that comes back late finds it.
struct Simulation {
  Simulation(int numDevices, std::uint64_t seed)
      : core(numDevices, seed),
        streams(core),
        cuda(core, streams),
        communicators(core),
        nccl(core, streams, communicators) {}

  // The one of this process; null between clusters.
  static std::shared_ptr<Simulation> current();
  static void setCurrent(std::shared_ptr<Simulation> simulation);

  Core core;
  Streams streams;
  CudaFunctions cuda;
  Communicators communicators;
  NcclFunctions nccl;
  Faults faults;
  Journal journal;
};

}  // namespace farandole::testing
