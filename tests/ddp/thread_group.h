#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "backend/extension/gathered_reductions.h"

namespace farandole::ddp {

// A process group whose ranks are threads of this process, with a store in memory. Collectives are
// asynchronous: a rank's tensors change only once every rank has called. Waits
// are bounded, so that a missing rank fails the test instead of hanging it.
class ThreadHub {
 public:
  explicit ThreadHub(int size) : size_(size) {}

  int size() const { return size_; }

  // Runs when all ranks are there, given their tensors by rank; fills them in place.
  using Combine = std::function<void(std::vector<std::vector<at::Tensor>>& tensorsByRank)>;

  // The `sequence`-th collective of `rank`.
  void arrive(size_t sequence, int rank, std::vector<at::Tensor> tensors, const Combine& combine);
  void await(size_t sequence);
  bool isDone(size_t sequence);

  // Ends all waits, and what comes, with an error.
  void abort();

 private:
  static constexpr std::chrono::seconds kTimeout{10};

  struct Collective {
    std::vector<std::vector<at::Tensor>> tensorsByRank;
    int arrived = 0;
    bool done = false;
  };

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<size_t, Collective> collectives_;
  bool aborted_ = false;
};

// One rank's end of a hub. Owner: its thread.
class ThreadBackend : public c10d::Backend, public GatheredReductions {
 public:
  ThreadBackend(std::shared_ptr<ThreadHub> hub, int rank);

  const std::string getBackendName() const override { return "threads"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;

  // Equal parts alone.
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& outputSplits, std::vector<int64_t>& inputSplits,
                                               const c10d::AllToAllOptions& options) override;

  bool gathers(c10::DeviceType) const override { return gathersTensors; }
  bool roundsOnce() const override { return true; }
  bool reducesInPlaces(c10::DeviceType) const override { return reducesTensorsInPlaces; }
  c10::intrusive_ptr<c10d::Work> allReduceInPlaces(const std::vector<at::Tensor>& tensors,
                                                   const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allReduceFrom(const std::vector<at::Tensor>& inputs, at::Tensor& output,
                                               const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduceScatterFrom(const std::vector<at::Tensor>& inputs, at::Tensor& whole,
                                                   at::Tensor& part,
                                                   const c10d::ReduceScatterOptions& options) override;

  void abort() override { hub_->abort(); }

  // What happened on this rank, e.g. "allreduce 64", "wait". Tests may add their own.
  std::vector<std::string> events;

  // Who reduces anything but the CPU's waits there until all ranks have called, as NCCL does while it connects them.
  bool waitsForRanks = false;

  bool gathersTensors = false;
  bool reducesTensorsInPlaces = false;  // for which it must gather, too

  // Fails the allreduce with this message when it is waited for.
  std::string failure;

  // Fails to start this all-gather of parts, counted from the next one on; nothing fails where it is negative.
  int failingGather = -1;

 private:
  c10::intrusive_ptr<c10d::Work> start(std::vector<at::Tensor> tensors, const ThreadHub::Combine& combine);

  std::shared_ptr<ThreadHub> hub_;
  size_t next_ = 0;
};

struct ThreadRank {
  int rank;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  c10::intrusive_ptr<ThreadBackend> backend;
};

// Runs `body` on `size` ranks and rethrows the first failure of any.
void runThreads(int size, const std::function<void(ThreadRank&)>& body);

// The same, where the ranks have two groups.
void runThreads(int size, const std::function<void(ThreadRank& first, ThreadRank& second)>& body);

// The same with ranks in a grid: `body` gets this rank's end of the group of its row, then of its column.
// Rank r is in row r / columns.
void runGrid(int rows, int columns, const std::function<void(int rank, ThreadRank& row, ThreadRank& column)>& body);

}  // namespace farandole::ddp
