#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <vector>

#include "backend/c10d/control_watch.h"
#include "backend/c10d/cuda_group.h"
#include "backend/c10d/cuda_messages.h"
#include "backend/c10d/flight_log.h"
#include "backend/c10d/open_batch.h"
#include "backend/c10d/process_context.h"
#include "backend/c10d/timeouts.h"
#include "backend/c10d/work.h"
#include "backend/c10d/work_hooks.h"
#include "backend/collective/algorithms.h"
#include "backend/common/repeated_message.h"
#include "backend/extension/gathered_reductions.h"

namespace farandole::backend {

class SparseSum;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// The c10d backend "farandole". Tensors on the CPU travel over UCX and shared memory, those on CUDA over NCCL; messages
// of them over UCX where that is set.
//
// Thread: any, as c10d asks; the collectives of one group must be called in the
// same order on all its ranks. Matching of messages is by (group, source, tag),
// first in first out.
class ProcessGroupFarandole final : public ::c10d::Backend, public RepeatedMessages, public GatheredReductions {
 public:
  struct Options final : ::c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : ::c10d::Backend::Options("farandole", timeout) {}
    // What says `virtual` overrides where torch has it (2.15), and is new where it does not (2.11).
    // NOLINTBEGIN(modernize-use-override)
    virtual c10::intrusive_ptr<::c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }
    // NOLINTEND(modernize-use-override)
  };

  // Meets the other ranks through the store; throws when one is missing after the timeout.
  ProcessGroupFarandole(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                        c10::intrusive_ptr<Options> options);
  ~ProcessGroupFarandole() override;
  // Instead of the constructor: tells the other ranks that this one will not come, and why.
  static void refuse(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size, const Options& options,
                     const std::string& reason);

  const std::string getBackendName() const override { return "farandole"; }
  // A copy: what torch writes into the options of a group that it splits stays out of this one.
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override { return copyOptions(); }
  c10::intrusive_ptr<Options> copyOptions() const;
  void setTimeout(std::chrono::milliseconds timeout) override {
    checkTimeout("set_timeout", timeout);
    timeout_ = timeout;
  }
  // NOLINTBEGIN(modernize-use-override)
  virtual void addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
    checkTimeout("add_ephemeral_timeout", timeout);
    hooks_->extendTimeout(timeout);
  }
  // NOLINTEND(modernize-use-override)
  void setGroupUid(const std::string& uid) override;
  std::uint64_t getSequenceNumberForGroup() override;
  void setSequenceNumberForGroup() override {}  // they start at 0 everywhere
  ::c10d::ErrorType getError() override;
  // Ends everything pending, on all ranks, with an error that names this one; the group cannot be used any more.
  void abort() override;
  // Ends everything pending, here; on other ranks what waits for this one. Collectives that are under way come to their
  // end first, where the others come to them within some seconds.
  void shutdown() override;

  // Groups out of this one (group_splits.cc).
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<::c10d::Backend> split(const c10::intrusive_ptr<::c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<::c10d::Backend::Options>& options) override;
  // This rank as `rank` of a group of `size` that also has ranks from outside this one.
  c10::intrusive_ptr<::c10d::Backend> merge(const c10::intrusive_ptr<::c10d::Store>& store,
                                            const c10::intrusive_ptr<::c10d::Backend::Options>& options,
                                            const int& rank, const int& size) override;
  bool supportsShrinking() const override { return true; }
  // A group without some ranks, which need not call; works after one of them died, too.
  c10::intrusive_ptr<::c10d::Backend> shrink(const std::vector<std::int64_t>& excluded, int flags,
                                             const c10::intrusive_ptr<::c10d::Backend::Options>& options) override;

  // Hooks: called when a work has ended (with success, the keyed ones) or failed (the abort hooks).
  void registerOnCompletionHook(WorkHooks::InfoHook&& hook) override;
  void waitForPendingWorks() override { hooks_->waitForFollowed(); }
  void enableCollectivesTiming() override { hooks_->enableTiming(); }
  // NOLINTBEGIN(modernize-use-override)
  virtual bool supportsCompletionHooks() const { return true; }
  virtual void registerCompletionHook(std::int64_t id, CompletionHook hook);
  virtual void unregisterCompletionHook(std::int64_t id) { hooks_->removeCompletionHook(id); }
  virtual bool supportsAbortHooks() const { return true; }
  virtual void registerAbortHook(std::int64_t id, std::function<void()> hook);
  virtual void unregisterAbortHook(std::int64_t id) { hooks_->removeAbortHook(id); }
  // NOLINTEND(modernize-use-override)

  // Point to point (point_to_point.cc).
  WorkPtr send(Tensors& tensors, int dstRank, int tag) override;
  WorkPtr recv(Tensors& tensors, int srcRank, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  // One Work per peer; none for an empty batch. Returns when all is posted.
  std::map<int, WorkPtr> batchP2p(std::vector<BatchEntry> entries, const std::string& label);
  // For what replays a plan; of tensors on the CPU.
  Result<std::unique_ptr<RepeatedMessage>> repeat(const RepeatedMessageSpec& spec) override;

  // Makes the CUDA half's communicator ahead of its first use, as torch does with init_process_group(device_id=).
  void eagerConnectSingleDevice(at::Device device) override;

  // NCCL's memory (cuda_memory.cc), by torch's names. An error says what is missing.
  // NOLINTBEGIN(modernize-use-override)
  virtual std::shared_ptr<c10::Allocator> getMemAllocator();
  // Of all communicators of this group: "total", "persist" and "suspend" bytes, and whether they are "suspended".
  virtual std::unordered_map<std::string, std::uint64_t> getMemoryStats();
  // NOLINTEND(modernize-use-override)
  // The pool's segments of now: again, when it has got more. `keeper` keeps the pool until it is deregistered or this
  // group is gone, since memory that NCCL knows must not be given back.
  void registerMemPool(CudaPoolId pool, bool isSymmetric, std::shared_ptr<void> keeper);
  // Once nothing that uses its memory is under way.
  void deregisterMemPool(CudaPoolId pool);

  // Collectives (collectives.cc).
  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;
  bool gathers(c10::DeviceType device) const override { return device == c10::kCPU; }
  bool roundsOnce() const override;
  WorkPtr allReduceFrom(const Tensors& inputs, at::Tensor& output, const ::c10d::AllreduceOptions& opts) override;
  bool reducesInPlaces(c10::DeviceType device) const override;
  WorkPtr allReduceInPlaces(const Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr reduceScatterFrom(const Tensors& inputs, at::Tensor& whole, at::Tensor& part,
                            const ::c10d::ReduceScatterOptions& opts) override;
  // Of a sparse tensor (COO): the sum, in place. The other kinds call it for sparse tensors. On CUDA the host waits for
  // the other ranks' shapes.
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
  // NOLINTBEGIN(modernize-use-override)
  virtual WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input, const ::c10d::GatherOptions& opts);
  // NOLINTEND(modernize-use-override)
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ::c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& outputSplits,
                        std::vector<std::int64_t>& inputSplits, const ::c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override;
  // Blocks. An error on every rank that did come says which rank did not, or which ranks.
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool waitAllRanks) override;

  // Begins to connect what messages of tensors on a CUDA device go along, for these peers; returns at once. Else the
  // first message to a peer, or from it, does that, and waits.
  void connectEdges(at::Device device, const std::vector<int>& sendTo, const std::vector<int>& recvFrom);
  // What carries messages to a rank, for people.
  std::string transportOf(int rank);
  // Which algorithms the collectives of this group use, a line for each rule, for people.
  std::vector<std::string> algorithms() const { return communicator_->describeAlgorithms(); }

 private:
  void close();
  // In the recorder; null where nothing is recorded.
  Result<std::shared_ptr<const GroupFlight>> startFlight();
  // What torch says of the group, once it is complete. Torch has no virtual method that tells when.
  void describeFlight();
  using BuildProgram = std::function<void(collective::Program&)>;
  using BuildCollective = CudaGroup::Build;

  // What c10d's options of all collectives have.
  struct Call {
    template <typename Options>
    Call(const Options& options) : timeout(options.timeout), isAsync(options.asyncOp) {}
    std::chrono::milliseconds timeout;
    bool isAsync;
  };

  // Ok, or how the ranks have ended the group.
  std::function<Status()> ranksHealth() const;
  // Of a group that was just made out of `parent`, but for some ranks: takes over what of CUDA all its ranks have
  // there.
  void connectFrom(ProcessGroupFarandole& parent, const std::vector<int>& excluded);
  // The CUDA half, made on first use; throws where there can be none (cuda_half.cc).
  CudaGroup& cuda();
  std::shared_ptr<CudaGroup> cudaIfAny();
  void connectHost(MeetingPlace& place, std::size_t windowBytes);
  void meetForCudaMessages(MeetingPlace& place, const std::vector<collective::Member>& members,
                           std::shared_ptr<void> keepAlive);

  // What batchP2p does once the entries are checked. `report`: of a batch that is one call; or null.
  std::map<int, WorkPtr> postBatch(std::vector<BatchEntry> entries, const std::string& label,
                                   const std::shared_ptr<PartsReport>& report);
  std::map<int, WorkPtr> postOnCpu(std::vector<BatchEntry> entries, const std::string& label,
                                   const std::shared_ptr<PartsReport>& report);
  std::map<int, WorkPtr> postOnCuda(std::vector<BatchEntry> entries, const std::string& label,
                                    const std::shared_ptr<PartsReport>& report);
  std::map<int, WorkPtr> postOnNccl(std::vector<BatchEntry> entries, std::shared_ptr<PartsReport> report);
  std::map<int, WorkPtr> postOnUcx(std::vector<BatchEntry> entries, const std::string& label,
                                   const std::shared_ptr<PartsReport>& report);
  WorkPtr pointToPoint(p2p::Direction direction, Tensors& tensors, int peer, int tag);
  // On the device of the tensors. What is read or written beyond `results` is in `kept`.
  WorkPtr runCollective(::c10d::OpType type, const char* title, const Call& call, Tensors results, Tensors kept,
                        const BuildCollective& build);
  WorkPtr sumOnCuda(SparseSum sum, const ::c10d::AllreduceOptions& opts);
  WorkPtr runProgram(::c10d::OpType type, const char* title, const Call& call, Tensors results, Tensors kept,
                     const BuildProgram& build);
  // What `make` makes, but that in an open batch the end of that throws for it, as for messages (Batch::noteRefusal).
  template <typename Make>
  WorkPtr toldByBatch(const Make& make);
  // Throws where the device of the tensor cannot reduce so.
  Reducing reducingFor(const char* operation, const ::c10d::ReduceOp& op, const at::Tensor& tensor);
  c10::intrusive_ptr<CollectiveWork> makeCollective(::c10d::OpType type, const char* title,
                                                    std::chrono::milliseconds timeout);
  // A monitored barrier, on rank 0 and elsewhere: what failed, or nothing. Its parts share one number.
  std::string awaitAll(const WorkOptions& options, bool waitAllRanks);
  std::string reportToRankZero(WorkOptions options);
  c10::intrusive_ptr<CollectiveWork> startBarrierPart(const WorkOptions& options, Tensors kept,
                                                      const BuildProgram& build);
  // `count`: of what it does, in a batch.
  WorkOptions workOptions(::c10d::OpType type, const char* title, std::chrono::milliseconds timeout,
                          std::uint64_t count = 1);
  const collective::Topology& topology() const { return communicator_->topology(); }

  // torch splits and merges once for each device that this one backend serves, over one store.
  c10::intrusive_ptr<::c10d::Store> storeForChild(const c10::intrusive_ptr<::c10d::Store>& store);
  // `ranks`: of this group, in their new order; empty where there are others in it.
  c10::intrusive_ptr<ProcessGroupFarandole> makeChild(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                                      int size,
                                                      const c10::intrusive_ptr<::c10d::Backend::Options>& options,
                                                      const std::vector<int>& ranks) const;

  const c10::intrusive_ptr<Options> options_;  // but for the timeout: read only
  std::atomic<std::chrono::milliseconds> timeout_;
  c10::intrusive_ptr<::c10d::Store> store_;  // of this group alone
  const std::shared_ptr<WorkHooks> hooks_ = std::make_shared<WorkHooks>();
  const GroupFlight* flight_ = nullptr;  // the communicator's; null where nothing is recorded
  std::atomic<bool> isFlightDescribed_{false};
  std::shared_ptr<ProcessContext> context_;
  std::shared_ptr<collective::Communicator> communicator_;
  const std::shared_ptr<CallCounts> counts_ = std::make_shared<CallCounts>();
  std::shared_ptr<ControlWatch> watch_;  // null where all ranks are on this host
  std::mutex cudaMutex_;
  std::shared_ptr<CudaGroup> cuda_;             // guarded by cudaMutex_; null before its first use
  std::shared_ptr<CudaMessages> cudaMessages_;  // null where NCCL carries them
  // A registered pool, and the devices whose communicators know it.
  struct RegisteredPool {
    std::set<int> devices;
    std::shared_ptr<void> keeper;
  };
  std::mutex poolsMutex_;
  std::map<CudaPoolId, RegisteredPool> pools_;
  std::mutex childMutex_;
  c10::weak_intrusive_ptr<::c10d::Store> lastChildStore_;
  int lastChildStoreUses_ = 0;
  int numShrinks_ = 0;
  const std::shared_ptr<OpenBatch> openBatch_ = std::make_shared<OpenBatch>();
};

}  // namespace farandole::backend
