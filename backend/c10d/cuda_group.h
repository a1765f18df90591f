#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backend/c10d/collective_calls.h"
#include "backend/c10d/work.h"
#include "backend/common/status.h"
#include "backend/transport/nccl/edge_talk.h"

namespace farandole::backend {

// A message of a batch, of tensors on one CUDA device; in the order of issue.
struct CudaMessage {
  bool isSend;
  at::Tensor tensor;
  int peer;
  std::uint32_t tag;
  std::uint64_t key = 0;  // what torch knows it by, where somebody is told of its end
};

// A pool of torch's caching allocator, as torch numbers it; and a piece of its memory.
using CudaPoolId = std::pair<std::uint64_t, std::uint64_t>;
struct CudaSegment {
  void* data;
  std::size_t bytes;
};

// The CUDA half of a process group, over NCCL: collectives on one communicator for each device that a rank uses, and
// an edge for each peer and direction. Semantics are those of ProcessGroupNCCL: operations come after what is on the
// current stream when they are issued, the host does not wait, and Work::wait() makes the then current stream wait.
// Any thread.
class CudaGroup {
 public:
  struct Setup {
    c10::intrusive_ptr<::c10d::Store> store;  // of this half alone
    std::shared_ptr<transport::EdgeTalk> talk;
    std::string name;
    int rank;
    int size;
    milliseconds timeout;  // of connecting
    // Ok, or how the ranks have ended the group elsewhere.
    std::function<Status()> ranksHealth;
    // Called once, with what ended the group, and whether `ranksHealth` said it: else the other ranks should know.
    std::function<void(const Status& why, bool ranksKnow)> onFailure;
  };
  // kUnavailable: this build or this machine has no NCCL; the message says what is missing.
  static Result<std::shared_ptr<CudaGroup>> make(const Setup& setup);

  // For the end of the process: nothing of CUDA is called any more that nobody asks for.
  static void leaveAtExit();

  // What torch's pools take to get memory by ncclMemAlloc. The process's; kUnavailable as above.
  static Result<std::shared_ptr<c10::Allocator>> allocator();
  // What the pool consists of now, by device; in the order in which it came, which is the same on all ranks whose pools
  // grow alike.
  static std::map<int, std::vector<CudaSegment>> segmentsOf(CudaPoolId pool);

  virtual ~CudaGroup() = default;

  using Build = std::function<void(CollectiveCalls&)>;
  // `isAsync`: on a stream of our own, else on the current one.
  virtual c10::intrusive_ptr<::c10d::Work> run(const WorkOptions& options, at::Device device, bool isAsync,
                                               std::vector<at::Tensor> results, std::vector<at::Tensor> kept,
                                               const Build& build) = 0;
  // An all_reduce of nothing, which Work::wait() waits for on the host.
  virtual c10::intrusive_ptr<::c10d::Work> barrier(const WorkOptions& options, at::Device device) = 0;
  // One Work for each peer.
  virtual std::map<int, c10::intrusive_ptr<::c10d::Work>> post(const WorkOptions& options, at::Device device,
                                                               std::vector<CudaMessage> messages) = 0;
  // Begins to connect what messages to these ranks, and from those, go along. Does not wait.
  virtual void connectEdges(at::Device device, const std::vector<int>& sendTo, const std::vector<int>& recvFrom) = 0;
  // For run(). Throws for a reduction that NCCL lacks; reads a factor that is a tensor, for which the host may wait.
  static Reducing reducing(const char* operation, const ::c10d::ReduceOp& op, at::ScalarType dtype);
  // Makes the communicator; blocks until all ranks have come.
  virtual void connect(at::Device device) = 0;
  // From now on the pool consists of these segments, which NCCL then uses without a copy. `isSymmetric`: all ranks do
  // this together, and NCCL makes one window of all ranks' memory, where it has such.
  virtual void registerMemory(at::Device device, CudaPoolId pool, const std::vector<CudaSegment>& segments,
                              bool isSymmetric) = 0;
  virtual void deregisterMemory(at::Device device, CudaPoolId pool) = 0;
  // What NCCL has allocated for this group on its devices, by torch's names.
  virtual std::unordered_map<std::string, std::uint64_t> memoryStats() = 0;
  // The devices whose communicators a smaller group could take over, by the order of their first use: the same numbers
  // on all ranks, unless some are ahead.
  virtual std::vector<int> connectedDevices() = 0;
  // On all ranks of this group, before they use it: connects those devices out of the parent's, which has the same
  // ranks and the excluded ones. Blocks until all ranks have come.
  virtual void connectFrom(CudaGroup& parent, const std::vector<int>& devices, const std::vector<int>& excluded) = 0;
  // Ok, or what ended it.
  virtual Status status() = 0;
  virtual void abort(const Status& why) = 0;
  // What is under way is waited for, as long as a peer may take, then aborted.
  virtual void close() = 0;
};

}  // namespace farandole::backend
