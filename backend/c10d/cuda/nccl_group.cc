// The CUDA half of a process group (backend/c10d/cuda_group.h) over NCCL.
#include "backend/c10d/contract.h"
#include "backend/c10d/cuda/cuda_environment.h"
#include "backend/c10d/cuda/cuda_operation.h"
#include "backend/c10d/cuda/cuda_work.h"
#include "backend/c10d/cuda/nccl_calls.h"
#include "backend/c10d/cuda/nccl_reductions.h"
#include "backend/c10d/cuda/store_meeting.h"
#include "backend/c10d/cuda_group.h"
#include "backend/c10d/errors.h"
#include "backend/common/settings.h"
#include "backend/transport/nccl/abortable_communicators.h"
#include "backend/transport/nccl/device_group.h"

namespace farandole::backend {
namespace {

using transport::DeviceGroup;
using transport::DeviceWatch;
using transport::EdgeMessage;
using transport::GroupOnDevice;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

// For what peers still have to take, when a group is destroyed.
constexpr std::chrono::seconds kClosingLimit{10};
// Of what groups that failed have left to NCCL, at the end of the process.
constexpr std::chrono::seconds kAbortsLimit{5};
// Of the device's processors, for each edge: few, to leave the others to the model. Not measured yet.
constexpr std::uint64_t kEdgeCtas = 4;
constexpr std::uint64_t kMostEdgeCtas = 64;

// The watch of all groups, while there is one.
struct SharedWatch {
  std::mutex mutex;
  std::weak_ptr<DeviceWatch> current;

  static SharedWatch& get() {
    static auto* const shared = new SharedWatch;  // used until the very end
    return *shared;
  }
};

std::shared_ptr<DeviceWatch> acquireWatch(const transport::DeviceRuntime& runtime) {
  SharedWatch& shared = SharedWatch::get();
  std::lock_guard lock(shared.mutex);
  auto watch = shared.current.lock();
  if (watch == nullptr) shared.current = watch = std::make_shared<DeviceWatch>(runtime.cuda);
  return watch;
}

class NcclProcessGroup final : public CudaGroup {
 public:
  NcclProcessGroup(const Setup& setup, CudaEnvironment environment, int edgeCtas)
      : rank_(setup.rank), size_(setup.size), environment_(environment) {
    const auto health = [ranks = setup.ranksHealth, weak = std::weak_ptr<IsOver>(isOver_)] {
      const auto over = weak.lock();
      if (over == nullptr || over->value) return Status::aborted("the group is over");
      return ranks();
    };
    group_ = std::make_shared<DeviceGroup>(
        transport::DeviceGroupSetup{environment.runtime, acquireWatch(*environment.runtime),
                                    std::make_shared<StoreMeeting>(setup.store, environment.runtime->nccl, health),
                                    setup.talk, setup.name, setup.rank, setup.size, edgeCtas, setup.timeout},
        setup.ranksHealth, setup.onFailure);
  }

  WorkPtr run(const WorkOptions& options, at::Device device, bool isAsync, std::vector<at::Tensor> results,
              std::vector<at::Tensor> kept, const Build& build) override {
    return launch(options, device, isAsync, std::move(results), kept, build, false);
  }

  WorkPtr barrier(const WorkOptions& options, at::Device device) override {
    if (!device.has_index()) {
      int current = 0;
      throwIfError(environment_.runtime->cuda.check(environment_.runtime->cuda.getDevice(&current), "cudaGetDevice"));
      device.set_index(static_cast<c10::DeviceIndex>(current));
    }
    at::Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device));
    const ::c10d::ReduceOp sum = ::c10d::ReduceOp::SUM;
    const Reducing reducing = CudaGroup::reducing("barrier", sum, at::kInt);
    const auto build = [&](CollectiveCalls& calls) {
      calls.allReduce(reducing, {static_cast<std::byte*>(token.data_ptr()), token.nbytes()});
    };
    return launch(options, device, true, {}, {token}, build, true);
  }

  std::map<int, WorkPtr> post(const WorkOptions& options, at::Device device,
                              std::vector<CudaMessage> messages) override {
    struct ForPeer {
      std::vector<at::Tensor> received;
      std::vector<std::shared_ptr<CudaOperation>> operations;
    };
    std::map<int, ForPeer> peers;
    std::vector<EdgeMessage> entries;
    std::vector<std::shared_ptr<CudaOperation>> all;
    WorkOptions own = options;
    for (const CudaMessage& message : messages) {
      const at::Tensor& tensor = message.tensor;
      auto operation = std::make_shared<CudaOperation>(own, message);
      operation->record();
      ++own.sequence;
      ForPeer& peer = peers[message.peer];
      if (!message.isSend) peer.received.push_back(tensor);
      peer.operations.push_back(operation);
      all.push_back(operation);
      const transport::EdgeNote note{message.tag, elementOf(tensor.scalar_type()), tensor.nbytes()};
      entries.push_back({message.isSend, message.peer, tensor.data_ptr(), note, operation});
    }
    const Status posted = withDevice(device, [&](GroupOnDevice& on) {
      return on.post(environment_.currentStream(device.index()), std::move(entries));
    });
    if (!posted) endAll(posted, all);
    std::map<int, WorkPtr> works;
    for (auto& [peer, content] : peers) {
      works.emplace(peer,
                    c10::make_intrusive<CudaWork>(options, environment_, group_, device.index(),
                                                  std::move(content.received), std::move(content.operations), false));
    }
    return works;
  }

  void connectEdges(at::Device device, const std::vector<int>& sendTo, const std::vector<int>& recvFrom) override {
    std::vector<transport::EdgeKey> edges;
    for (const int peer : sendTo) edges.push_back({peer, true});
    for (const int peer : recvFrom) edges.push_back({peer, false});
    throwIfError(withDevice(device, [&](GroupOnDevice& on) { return on.connectEdges(edges); }));
  }

  void connect(at::Device device) override {
    TORCH_CHECK_VALUE(device.has_index(), "farandole: device is ", device, "; expected one with an index");
    throwIfError(withDevice(device, [](GroupOnDevice& on) { return on.connect(); }));
  }

  void registerMemory(at::Device device, CudaPoolId pool, const std::vector<CudaSegment>& segments,
                      bool isSymmetric) override {
    std::vector<transport::MemorySegment> memory;
    memory.reserve(segments.size());
    for (const CudaSegment& segment : segments) memory.push_back({segment.data, segment.bytes});
    const Status status =
        withDevice(device, [&](GroupOnDevice& on) { return on.registerMemory(pool, memory, isSymmetric); });
    // The other ranks wait for this one.
    const bool endsGroup = isSymmetric && !status && status.code() != StatusCode::kInvalidArgument &&
                           status.code() != StatusCode::kUnavailable;
    if (endsGroup) group_->fail(status);
    throwIfError(status.wrapUnlessOk("register_mem_pool"));
  }
  void deregisterMemory(at::Device device, CudaPoolId pool) override {
    throwIfError(withDevice(device, [&](GroupOnDevice& on) {
                   return on.deregisterMemory(pool);
                 }).wrapUnlessOk("deregister_mem_pool"));
  }
  std::unordered_map<std::string, std::uint64_t> memoryStats() override {
    transport::NcclMemoryUse use;
    throwIfError(group_->addMemoryUse(use).wrapUnlessOk("memory_stats"));
    return {{"suspend", use.suspendable},
            {"suspended", use.isSuspended ? 1 : 0},
            {"persist", use.persistent},
            {"total", use.total}};
  }

  std::vector<int> connectedDevices() override { return group_->connectedDevices(); }
  void connectFrom(CudaGroup& parent, const std::vector<int>& devices, const std::vector<int>& excluded) override {
    // There is no other kind.
    throwIfError(group_->connectFrom(*static_cast<NcclProcessGroup&>(parent).group_, devices, excluded));
  }

  Status status() override { return group_->status(); }
  void abort(const Status& why) override {
    isOver_->value = true;
    group_->abort(why);
  }
  void close() override {
    isOver_->value = true;
    group_->close(kClosingLimit);
  }

 private:
  // Ends the waiting of threads that still connect.
  struct IsOver {
    std::atomic<bool> value{false};
  };

  template <typename Use>
  Status withDevice(at::Device device, const Use& use) {
    auto on = group_->on(device.index());
    return on ? use(**on) : on.status();
  }

  WorkPtr launch(const WorkOptions& options, at::Device device, bool isAsync, std::vector<at::Tensor> results,
                 const std::vector<at::Tensor>& kept, const Build& build, bool hostWaits) {
    auto operation = std::make_shared<CudaOperation>(options, results, kept);
    const auto calls = [&](transport::NcclGroup& group, ncclComm_t communicator, cudaStream_t stream) {
      NcclCalls into(environment_.runtime->nccl, group, communicator, stream, rank_, size_);
      build(into);
    };
    operation->record();
    const Status launched = withDevice(device, [&](GroupOnDevice& on) {
      return on.run(environment_.currentStream(device.index()), !isAsync, operation, calls);
    });
    if (!launched) endAll(launched, {operation});
    return c10::make_intrusive<CudaWork>(options, environment_, group_, device.index(), std::move(results),
                                         std::vector{std::move(operation)}, hostWaits);
  }

  // What could not be issued here has no counterpart elsewhere: misuse is told to the caller alone, all else ends the
  // group.
  void endAll(const Status& why, const std::vector<std::shared_ptr<CudaOperation>>& operations) {
    if (why.code() != StatusCode::kInvalidArgument) group_->fail(why);
    for (const auto& operation : operations) operation->finish(why);
    throwIfError(why);
  }

  const int rank_;
  const int size_;
  const CudaEnvironment environment_;
  const std::shared_ptr<IsOver> isOver_ = std::make_shared<IsOver>();
  std::shared_ptr<DeviceGroup> group_;
};

}  // namespace

Result<std::shared_ptr<CudaGroup>> CudaGroup::make(const Setup& setup) {
  const auto environment = CudaEnvironment::current();
  if (!environment) return environment.status();
  const auto ctas = byteSetting("FARANDOLE_NCCL_EDGE_CTAS", kEdgeCtas, 0, kMostEdgeCtas);
  if (!ctas) return ctas.status();
  return std::shared_ptr<CudaGroup>(std::make_shared<NcclProcessGroup>(setup, *environment, static_cast<int>(*ctas)));
}

Reducing CudaGroup::reducing(const char* operation, const ::c10d::ReduceOp& op, at::ScalarType dtype) {
  return {op, dtype, ncclReductionFor(operation, op, dtype)};
}

void CudaGroup::leaveAtExit() {
  std::shared_ptr<DeviceWatch> watch;
  {
    SharedWatch& shared = SharedWatch::get();
    std::lock_guard lock(shared.mutex);
    watch = shared.current.lock();
  }
  if (watch != nullptr) watch->stop();
  transport::Aborts::waitForAll(kAbortsLimit);
}

}  // namespace farandole::backend
