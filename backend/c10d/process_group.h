#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/c10d/batch_member_work.h"
#include "backend/c10d/process_context.h"
#include "backend/c10d/work.h"
#include "backend/collective/algorithms.h"
#include "backend/p2p/batch_plan.h"

namespace farandole::backend {

using WorkPtr = c10::intrusive_ptr<::c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// One entry of a batch: a tensor to send to `peer` or to receive from it.
struct BatchEntry {
  p2p::Direction direction;
  at::Tensor tensor;
  int peer;
  int tag;
};

// The c10d backend "farandole". Tensors on the CPU travel over UCX.
//
// Thread: any, as c10d asks; the collectives of one group must be called in the
// same order on all its ranks. Matching of messages is by (group, source, tag),
// first in first out.
class ProcessGroupFarandole final : public ::c10d::Backend {
 public:
  struct Options final : ::c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : ::c10d::Backend::Options("farandole", timeout) {}
  };

  // Meets the other ranks through the store; throws when one is missing after the timeout.
  ProcessGroupFarandole(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                        c10::intrusive_ptr<Options> options);
  ~ProcessGroupFarandole() override;

  const std::string getBackendName() const override { return "farandole"; }
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  std::uint64_t getSequenceNumberForGroup() override;
  void setSequenceNumberForGroup() override {}  // they start at 0 everywhere
  ::c10d::ErrorType getError() override;
  // Ends everything pending, here, with an error; the group cannot be used any more.
  void abort() override;
  void shutdown() override;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<::c10d::Backend> split(const c10::intrusive_ptr<::c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<::c10d::Backend::Options>& options) override;

  // Point to point (point_to_point.cc).
  WorkPtr send(Tensors& tensors, int dstRank, int tag) override;
  WorkPtr recv(Tensors& tensors, int srcRank, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  // One Work per peer; none for an empty batch. Returns when all is posted.
  std::map<int, WorkPtr> batchP2p(std::vector<BatchEntry> entries, const std::string& label);

  // Collectives (collectives.cc).
  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
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

  // What carries messages to a rank, for people.
  std::string transportOf(int rank);

 private:
  // Between startCoalescing and endCoalescing: what the calling thread issues is kept, not posted.
  struct Batch {
    std::thread::id thread;
    std::vector<BatchEntry> entries;
    std::vector<WorkPtr> collectives;
    c10::intrusive_ptr<BatchMemberWork> member;
  };

  using BuildProgram = std::function<void(collective::Program&)>;

  WorkPtr pointToPoint(p2p::Direction direction, Tensors& tensors, int peer, int tag);
  Batch* openBatchOfThisThread();
  void dropBatch();
  // What the program reads or writes beyond `results` is in `kept`.
  WorkPtr runCollective(::c10d::OpType type, const char* title, std::chrono::milliseconds timeout, Tensors results,
                        Tensors kept, const BuildProgram& build);
  WorkOptions workOptions(::c10d::OpType type, const char* title, std::chrono::milliseconds timeout);
  collective::Topology topology() const { return {rank_, size_}; }

  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<ProcessContext> context_;
  std::shared_ptr<collective::Communicator> communicator_;
  std::atomic<std::uint32_t> collectiveSequence_{0};
  std::atomic<std::uint64_t> pointToPointSequence_{0};
  std::mutex batchMutex_;
  std::optional<Batch> batch_;
  std::atomic<bool> batchOpen_{false};
};

}  // namespace farandole::backend
