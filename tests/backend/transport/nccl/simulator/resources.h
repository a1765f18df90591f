#pragma once

#include <nccl.h>

#include <cstdint>
#include <map>
#include <memory>

#include "tests/backend/transport/nccl/simulator/communicator.h"
#include "tests/backend/transport/nccl/simulator/reductions.h"

namespace farandole::testing {

// What a communicator holds besides kernels: reduction operations and registered memory; and NCCL's own allocations.
// A method for each member of NcclApi.
class Resources {
 public:
  Resources(Core& core, Communicators& communicators) : core_(core), communicators_(communicators) {}
  ~Resources();

  ncclResult_t redOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                    ncclScalarResidence_t residence, ncclComm_t communicator);
  ncclResult_t redOpDestroy(ncclRedOp_t op, ncclComm_t communicator);
  ncclResult_t commRegister(ncclComm_t communicator, void* buffer, std::size_t size, void** handle);
  ncclResult_t commDeregister(ncclComm_t communicator, void* handle);
  ncclResult_t memAlloc(void** memory, std::size_t size);
  ncclResult_t memFree(void* memory);
  ncclResult_t commMemStats(ncclComm_t communicator, int statistic, std::uint64_t* value);

  // The rest is called with the lock.

  ncclResult_t operatorOf(ncclRedOp_t op, ncclDataType_t dtype, const Communicator& communicator, const char* function,
                          Operator& found);
  void* addRegistration(Communicator& communicator, void* buffer, std::size_t size, bool window);
  ncclResult_t removeRegistration(ncclComm_t communicator, void* handle, bool window, const char* function);
  // The communicator was freed, and with it what is its own.
  void drop(const Communicator& communicator);
  int countOperators() const;
  int countRegistrations() const;
  int countAllocations() const { return static_cast<int>(allocations_.size()); }

 private:
  struct CreatedOperator {
    Communicator* communicator;
    ncclDataType_t dtype;
    Operator op;
    bool live;
  };
  struct Registration {
    Communicator* communicator;
    const std::byte* begin;
    std::size_t size;
    bool window;
    bool live;
  };

  Core& core_;
  Communicators& communicators_;
  std::map<int, CreatedOperator> operators_;
  std::map<void*, std::unique_ptr<Registration>> registrations_;
  std::map<void*, std::size_t> allocations_;
};

}  // namespace farandole::testing
