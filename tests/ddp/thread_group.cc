#include "tests/ddp/thread_group.h"

#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

namespace farandole::ddp {
namespace {

class ThreadWork : public c10d::Work {
 public:
  ThreadWork(std::shared_ptr<ThreadHub> hub, size_t sequence, ThreadBackend* backend)
      : hub_(std::move(hub)), sequence_(sequence), backend_(backend) {}

  bool wait(std::chrono::milliseconds) override {
    hub_->await(sequence_);
    backend_->events.emplace_back("wait");
    TORCH_CHECK(backend_->failure.empty(), backend_->failure);
    return true;
  }

 private:
  std::shared_ptr<ThreadHub> hub_;
  const size_t sequence_;
  ThreadBackend* const backend_;
};

}  // namespace

void ThreadHub::arrive(size_t sequence, int rank, std::vector<at::Tensor> tensors, const Combine& combine) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!aborted_, "aborted");
  Collective& collective = collectives_[sequence];
  collective.tensorsByRank.resize(size_);
  collective.tensorsByRank[rank] = std::move(tensors);
  if (++collective.arrived < size_) return;
  c10::NoGradGuard noGrad;
  combine(collective.tensorsByRank);
  collective.tensorsByRank.clear();
  collective.done = true;
  changed_.notify_all();
}

void ThreadHub::await(size_t sequence) {
  std::unique_lock lock(mutex_);
  const bool done = changed_.wait_for(lock, kTimeout, [&] { return aborted_ || collectives_[sequence].done; });
  TORCH_CHECK(!aborted_ || collectives_[sequence].done, "aborted");
  TORCH_CHECK(done, "collective ", sequence, ": ", size_ - collectives_[sequence].arrived, " ranks never came");
}

void ThreadHub::abort() {
  std::lock_guard lock(mutex_);
  aborted_ = true;
  changed_.notify_all();
}

ThreadBackend::ThreadBackend(std::shared_ptr<ThreadHub> hub, int rank)
    : Backend(rank, hub->size()), hub_(std::move(hub)) {}

c10::intrusive_ptr<c10d::Work> ThreadBackend::start(std::vector<at::Tensor> tensors,
                                                    const ThreadHub::Combine& combine) {
  const size_t sequence = next_++;
  hub_->arrive(sequence, getRank(), std::move(tensors), combine);
  return c10::make_intrusive<ThreadWork>(hub_, sequence, this);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                        const c10d::AllreduceOptions& options) {
  TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "only SUM");
  events.push_back("allreduce " + std::to_string(tensors.at(0).numel()));
  return start(tensors, [](auto& byRank) {
    at::Tensor sum = byRank[0][0].clone();
    for (size_t rank = 1; rank < byRank.size(); ++rank) sum.add_(byRank[rank][0]);
    for (auto& tensors : byRank) tensors[0].copy_(sum);
  });
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                        const c10d::BroadcastOptions& options) {
  return start(tensors, [root = options.rootRank](auto& byRank) {
    for (auto& tensors : byRank) tensors[0].copy_(byRank[root][0]);
  });
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                        std::vector<at::Tensor>& inputs,
                                                        const c10d::AllgatherOptions& options) {
  std::vector<at::Tensor> tensors = outputs.at(0);
  tensors.push_back(inputs.at(0));  // by rank: the outputs, then the input
  return start(std::move(tensors), [](auto& byRank) {
    for (auto& tensors : byRank) {
      for (size_t rank = 0; rank < byRank.size(); ++rank) tensors[rank].copy_(byRank[rank].back());
    }
  });
}

void runThreads(int size, const std::function<void(ThreadRank&)>& body) {
  auto hub = std::make_shared<ThreadHub>(size);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> failures(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
        auto backend = c10::make_intrusive<ThreadBackend>(hub, rank);
        group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
        ThreadRank self{rank, group, backend};
        body(self);
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace farandole::ddp
