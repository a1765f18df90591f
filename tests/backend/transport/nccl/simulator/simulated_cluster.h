#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backend/transport/nccl/cuda_api.h"
#include "backend/transport/nccl/nccl_api.h"
#include "tests/backend/transport/nccl/simulator/journal.h"

namespace farandole::testing {

struct Simulation;
struct Stream;

// GPUs with CUDA streams and NCCL between them, in this process, for tests where there are none. Ranks are threads of
// the test, each with a device; host memory stands for the devices'. One thread runs all streams, each time one whose
// head can go, chosen by the seed, so that a dependency that nobody stated shows as wrong data. One cluster at a time
// in a process, for the functions carry no state; what it handed out means nothing afterwards. Any thread may call
// anything.
//
// What is stricter than NCCL: messages wait for their receiver whatever their size, and the calls of a group go to one
// kernel for each communicator, which must have its counterpart on the other ranks. As in NCCL a communicator's kernels
// run one after the other, whatever their streams. What is not simulated: fp8,
// communicators that are made in groups or without blocking, time, and the ordering that CUDA adds between the legacy
// stream (a null handle) and blocking streams.
class SimulatedCluster {
 public:
  SimulatedCluster(int numDevices, std::uint64_t seed);
  // Whatever is pending ends here, and every call that is blocked returns. Only a function of enqueue() is waited for.
  ~SimulatedCluster();
  SimulatedCluster(const SimulatedCluster&) = delete;
  SimulatedCluster& operator=(const SimulatedCluster&) = delete;

  transport::NcclApi nccl() const;
  transport::CudaApi cuda() const;
  // Without: the newer functions of tables that are made from now on are null.
  void setNewerFunctions(bool present);
  // Whether a group that uses a connection for the first time blocks the host until the peer uses it, too, as NCCL's
  // does. Off at first.
  void setConnectsBlock(bool block);

  // A new stream of the user's, which is not counted in live().
  cudaStream_t userStream(int device);
  // The user's own kernel. It runs on the executor's thread and may call anything but what blocks.
  void enqueue(cudaStream_t stream, std::function<void()> function);
  // False: not finished in time.
  bool synchronize(cudaStream_t stream, std::chrono::milliseconds limit);
  // A kernel that lasts until release(), in front of what follows. Each release ends the first one that still lasts.
  void hold(cudaStream_t stream);
  void release(cudaStream_t stream);

  // In CUDA's global mode. What is put into the stream meanwhile, and into those that come to wait for it, is kept.
  void beginCapture(cudaStream_t stream);
  void endCapture(cudaStream_t stream);
  // Whether graphs exist to the end: NCCL waits for those that have captured a communicator before it ends that. Off
  // at first, as if they went with the capture.
  void setGraphsStay(bool stay);
  // Launches the last graph that was captured from this stream, into `into` or the stream itself.
  void replay(cudaStream_t stream, cudaStream_t into = nullptr);

  // The `nth` call of, say, "ncclSend" from now, counted from 1, fails with `code`; of threads with this current
  // device, or of any. A failed call does nothing, but for a group, which it ends.
  void failNccl(const std::string& function, int nth, ncclResult_t code, int device = -1);
  void failCuda(const std::string& function, int nth, cudaError_t code, int device = -1);
  // What ncclCommGetAsyncError gives from now on for all communicators of the device.
  void failAsync(int device, ncclResult_t code);
  // The process of this device died: its streams stand still. Its peers are told by ncclCommGetAsyncError, and those
  // that wait for it on the host by ncclRemoteError, after 50 ms, or 1 s where it is not certain that it is the dead
  // one who is missing from a commInit. Their kernels stay stuck.
  void killRank(int device);

  // Waits until at least `calls` calls are blocked on the host.
  bool waitUntilBlocked(int calls, std::chrono::milliseconds limit) const;

  // Misuse that CUDA or NCCL would answer with undefined behaviour, a hang or an error. "function: text".
  std::vector<std::string> violations() const;

  // What a communicator was made as; of a null or freed handle nothing.
  struct CommunicatorInfo {
    std::string name;
    int rank = -1, size = 0, device = -1;
    int maxCtas = 0;  // 0: not set
  };
  CommunicatorInfo info(ncclComm_t communicator) const;

  // What was made and not yet destroyed; a communicator takes its operations and registrations with it.
  struct Live {
    int streams = 0, events = 0, communicators = 0, redOps = 0, registrations = 0, allocations = 0;
    bool operator==(const Live&) const = default;
  };
  Live live() const;

  // The calls in the order of issue, without those that only look (event queries, async errors, devices, capture).
  std::vector<Call> calls() const;
  std::map<std::string, int> callCounts() const;  // of all

 private:
  Stream* find(cudaStream_t handle, const char* function) const;

  std::shared_ptr<Simulation> simulation_;
  std::thread executor_;
};

}  // namespace farandole::testing
