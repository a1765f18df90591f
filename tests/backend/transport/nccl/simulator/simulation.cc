#include "tests/backend/transport/nccl/simulator/simulation.h"

#include <mutex>
#include <utility>

namespace farandole::testing {
namespace {

std::mutex currentMutex;

std::shared_ptr<Simulation>& slot() {
  static std::shared_ptr<Simulation> simulation;
  return simulation;
}

}  // namespace

const char* NcclFunctions::getErrorString(ncclResult_t result) const {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

std::shared_ptr<Simulation> Simulation::current() {
  const std::lock_guard lock(currentMutex);
  return slot();
}

void Simulation::setCurrent(std::shared_ptr<Simulation> simulation) {
  const std::lock_guard lock(currentMutex);
  slot() = std::move(simulation);
}

}  // namespace farandole::testing
