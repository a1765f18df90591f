#include "tests/backend/transport/nccl/simulator/function_tables.h"

#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "tests/backend/transport/nccl/simulator/simulation.h"

namespace farandole::testing {
namespace {

// What the journal keeps of the arguments, found by their types: of data calls the first size is the count, and an int
// the peer or the root.
struct Description {
  void see(ncclComm_t handle) { communicator = handle; }
  void see(cudaStream_t handle) { stream = handle; }
  void see(ncclDataType_t type) { dtype = type; }
  void see(std::size_t value) { size = value; }
  void see(int value) { number = value; }
  template <typename Other>
  void see(const Other&) {}

  ncclComm_t communicator = nullptr;
  cudaStream_t stream = nullptr;
  ncclDataType_t dtype = ncclNumTypes;
  std::size_t size = 0;
  int number = -1;
};

bool onlyLooks(std::string_view function) {
  return function == "cudaEventQuery" || function == "ncclCommGetAsyncError" || function == "cudaGetLastError" ||
         function == "cudaGetDevice" || function == "cudaSetDevice" || function == "cudaStreamIsCapturing";
}

template <typename... Args>
std::optional<int> begin(Simulation& simulation, const char* function, const Args&... args) {
  Description found;
  (found.see(args), ...);
  const int device = ThreadState::of(simulation.core).device;
  const std::lock_guard lock(simulation.core.mutex);
  ++simulation.journal.counts[function];
  if (!onlyLooks(function)) {
    Call call{device, std::this_thread::get_id(), function, "", -1, found.size, found.stream};
    const Communicator* const communicator = simulation.communicators.lookUp(found.communicator);
    if (communicator != nullptr) call.communicator = communicator->name;
    if (found.dtype != ncclNumTypes) {
      call.peer = found.number;
      call.bytes *= elementSize(found.dtype);
    }
    simulation.journal.calls.push_back(std::move(call));
  }
  return simulation.faults.take(function, device);
}

ncclResult_t ended(Simulation& simulation, ncclResult_t result) {
  if (result != ncclSuccess) ThreadState::of(simulation.core).lastNcclError = "simulated";
  return result;
}

cudaError_t ended(Simulation& simulation, cudaError_t result) {
  if (result != cudaSuccess) ThreadState::of(simulation.core).lastError = result;
  return result;
}

void failed(Simulation& simulation, ncclResult_t result, std::string_view function) {
  simulation.nccl.failed(result, function == "ncclGroupEnd");
}

void failed(Simulation& simulation, cudaError_t result, std::string_view function) {}

template <typename Function, typename Signature>
struct Entry;

template <typename Function, typename Result, typename... Args>
struct Entry<Function, Result (*)(Args...)> {
  static Result call(Args... args) {
    const std::shared_ptr<Simulation> simulation = Simulation::current();
    if (simulation == nullptr) return static_cast<Result>(1);  // unhandled CUDA error, or invalid value
    if (const auto fault = begin(*simulation, Function::kName, args...)) {
      const auto result = static_cast<Result>(*fault);
      failed(*simulation, result, Function::kName);
      return ended(*simulation, result);
    }
    const Result result = Function::run(*simulation, args...);
    return Function::kName == std::string_view("cudaGetLastError") ? result : ended(*simulation, result);
  }
};

// Those that give texts.
template <typename Function, typename... Args>
struct Entry<Function, const char* (*)(Args...)> {
  static const char* call(Args... args) {
    const std::shared_ptr<Simulation> simulation = Simulation::current();
    return simulation == nullptr ? "no simulated cluster" : Function::run(*simulation, args...);
  }
};

// A type for each function of a table, which says its name and calls the simulation's method.
#define FARANDOLE_FUNCTION(side, member, function)          \
  struct function##Entry {                                  \
    static constexpr const char* kName = #function;         \
    template <typename... Args>                             \
    static auto run(Simulation& simulation, Args... args) { \
      return simulation.side.member(args...);               \
    }                                                       \
  };
#define FARANDOLE_NCCL_FUNCTION(member, function, ...) FARANDOLE_FUNCTION(nccl, member, function)
#define FARANDOLE_CUDA_FUNCTION(member, function) FARANDOLE_FUNCTION(cuda, member, function)
FARANDOLE_NCCL_FUNCTIONS(FARANDOLE_NCCL_FUNCTION)
FARANDOLE_NCCL_NEWER_FUNCTIONS(FARANDOLE_NCCL_FUNCTION)
FARANDOLE_CUDA_FUNCTIONS(FARANDOLE_CUDA_FUNCTION)
#undef FARANDOLE_FUNCTION
#undef FARANDOLE_NCCL_FUNCTION
#undef FARANDOLE_CUDA_FUNCTION

}  // namespace

#define FARANDOLE_FILL(member, function, ...) api.member = &Entry<function##Entry, decltype(api.member)>::call;

transport::NcclApi simulatedNccl(bool newerFunctions) {
  transport::NcclApi api;
  FARANDOLE_NCCL_FUNCTIONS(FARANDOLE_FILL)
  if (newerFunctions) {
    FARANDOLE_NCCL_NEWER_FUNCTIONS(FARANDOLE_FILL)
  }
  return api;
}

transport::CudaApi simulatedCuda() {
  transport::CudaApi api;
  FARANDOLE_CUDA_FUNCTIONS(FARANDOLE_FILL)
  api.restoreDevice = api.setDevice;
  return api;
}

#undef FARANDOLE_FILL

}  // namespace farandole::testing
