#include "tests/ddp/thread_group.h"

#include <array>
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

  bool isCompleted() override { return hub_->isDone(sequence_); }

 private:
  std::shared_ptr<ThreadHub> hub_;
  const size_t sequence_;
  ThreadBackend* const backend_;
};

at::Tensor combined(const std::vector<at::Tensor>& inputs, const c10d::ReduceOp& op) {
  at::Tensor result = inputs[0].clone();
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    op == c10d::ReduceOp::MAX ? result.copy_(at::maximum(result, inputs[rank])) : result.add_(inputs[rank]);
  }
  if (op == c10d::ReduceOp::AVG) result.div_(static_cast<double>(inputs.size()));
  TORCH_CHECK(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::MAX, "only these");
  return result;
}

// Each part of `whole`, one after another.
void cut(const at::Tensor& whole, std::vector<at::Tensor>::iterator part, std::vector<at::Tensor>::iterator end) {
  for (int64_t begin = 0; part != end; begin += part->numel(), ++part) {
    part->copy_(whole.slice(0, begin, begin + part->numel()).view(part->sizes()));
  }
}

// Each rank brings where the result goes, and after it what it gives where that is not there; undefined: it goes there.
ThreadHub::Combine sumInto(const c10d::ReduceOp& op) {
  return [op](std::vector<std::vector<at::Tensor>>& byRank) {
    std::vector<at::Tensor> given;
    for (const std::vector<at::Tensor>& tensors : byRank) {
      std::vector<at::Tensor> flat;
      for (size_t i = 1; i < tensors.size(); ++i) flat.push_back(tensors[i].reshape({-1}));
      given.push_back(flat.empty() ? tensors[0] : at::cat(flat));
    }
    const at::Tensor reduced = combined(given, op);
    for (std::vector<at::Tensor>& tensors : byRank) {
      tensors[0].defined() ? void(tensors[0].copy_(reduced)) : cut(reduced, tensors.begin() + 1, tensors.end());
    }
  };
}

// Each rank brings where its part goes, and what it gives.
ThreadHub::Combine scatterOf(const c10d::ReduceOp& op) {
  return [op](std::vector<std::vector<at::Tensor>>& byRank) {
    std::vector<at::Tensor> inputs;
    for (const std::vector<at::Tensor>& tensors : byRank) inputs.push_back(tensors[1]);
    const std::vector<at::Tensor> parts = combined(inputs, op).chunk(static_cast<int64_t>(byRank.size()));
    for (size_t rank = 0; rank < parts.size(); ++rank) byRank[rank][0].copy_(parts[rank]);
  };
}

// The sizes of the inputs, in brackets where they are not in the output, if there is one.
std::string describe(const std::vector<at::Tensor>& inputs, const at::Tensor& output) {
  std::string text;
  for (const at::Tensor& input : inputs) {
    const std::string size = std::to_string(input.numel());
    text += !output.defined() || input.is_alias_of(output) ? " " + size : " [" + size + "]";
  }
  return text;
}

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

bool ThreadHub::isDone(size_t sequence) {
  std::lock_guard lock(mutex_);
  return collectives_[sequence].done;
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
  const bool waits = waitsForRanks && !tensors[0].is_cpu();
  hub_->arrive(sequence, getRank(), std::move(tensors), combine);
  if (waits) hub_->await(sequence);
  return c10::make_intrusive<ThreadWork>(hub_, sequence, this);
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                        const c10d::AllreduceOptions& options) {
  events.push_back("allreduce " + std::to_string(tensors.at(0).numel()));
  return start(tensors, sumInto(options.reduceOp));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allReduceFrom(const std::vector<at::Tensor>& inputs, at::Tensor& output,
                                                            const c10d::AllreduceOptions& options) {
  events.push_back("allreduce" + describe(inputs, output));
  std::vector<at::Tensor> tensors = {output};
  tensors.insert(tensors.end(), inputs.begin(), inputs.end());
  return start(std::move(tensors), sumInto(options.reduceOp));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allReduceInPlaces(const std::vector<at::Tensor>& tensors,
                                                                const c10d::AllreduceOptions& options) {
  events.push_back("allreduce in" + describe(tensors, at::Tensor()));
  std::vector<at::Tensor> all = {at::Tensor()};
  all.insert(all.end(), tensors.begin(), tensors.end());
  return start(std::move(all), sumInto(options.reduceOp));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::reduceScatterFrom(const std::vector<at::Tensor>& inputs,
                                                                at::Tensor& whole, at::Tensor& part,
                                                                const c10d::ReduceScatterOptions& options) {
  events.push_back("reduce_scatter" + describe(inputs, whole));
  std::vector<at::Tensor> flat;
  for (const at::Tensor& input : inputs) flat.push_back(input.reshape({-1}));
  return start({part, at::cat(flat)}, scatterOf(options.reduceOp));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                   const c10d::ReduceScatterOptions& options) {
  events.push_back("reduce_scatter " + std::to_string(input.numel()));
  return start({output, input}, scatterOf(options.reduceOp));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                              const c10d::AllgatherOptions& options) {
  TORCH_CHECK(failingGather-- != 0, "this all-gather does not start");
  events.push_back("allgather " + std::to_string(output.numel()));
  return start({output, input}, [](auto& byRank) {
    std::vector<at::Tensor> inputs;
    for (auto& tensors : byRank) inputs.push_back(tensors[1]);
    const at::Tensor whole = at::cat(inputs);
    for (auto& tensors : byRank) tensors[0].copy_(whole);
  });
}

namespace {

std::vector<at::Tensor> partsOf(const at::Tensor& whole, const std::vector<int64_t>& splits, int ranks) {
  const std::vector<int64_t> equal(ranks, whole.size(0) / ranks);
  return whole.split_with_sizes(splits.empty() ? equal : splits);
}

}  // namespace

c10::intrusive_ptr<c10d::Work> ThreadBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                            std::vector<int64_t>& outputSplits,
                                                            std::vector<int64_t>& inputSplits,
                                                            const c10d::AllToAllOptions&) {
  std::vector<at::Tensor> parts = partsOf(output, outputSplits, getSize());
  const std::vector<at::Tensor> sent = partsOf(input, inputSplits, getSize());
  parts.insert(parts.end(), sent.begin(), sent.end());
  return start(std::move(parts), [](auto& byRank) {
    const std::size_t size = byRank.size();
    for (std::size_t rank = 0; rank < size; ++rank) {
      for (std::size_t to = 0; to < size; ++to) byRank[to][rank].copy_(byRank[rank][size + to]);
    }
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

namespace {

ThreadRank rankOf(const std::shared_ptr<ThreadHub>& hub, const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, hub->size());
  auto backend = c10::make_intrusive<ThreadBackend>(hub, rank);
  // What is on meta stands for what is on a device.
  for (const at::DeviceType device : {at::kCPU, at::kMeta}) {
    group->setBackend(device, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  }
  return {rank, group, backend};
}

void runRanks(int size, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> failures(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
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

}  // namespace

void runThreads(int size, const std::function<void(ThreadRank&)>& body) {
  auto hub = std::make_shared<ThreadHub>(size);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  runRanks(size, [&](int rank) {
    ThreadRank self = rankOf(hub, store, rank);
    body(self);
  });
}

void runThreads(int size, const std::function<void(ThreadRank& first, ThreadRank& second)>& body) {
  const std::array hubs = {std::make_shared<ThreadHub>(size), std::make_shared<ThreadHub>(size)};
  const auto store = c10::make_intrusive<c10d::HashStore>();
  runRanks(size, [&](int rank) {
    ThreadRank first = rankOf(hubs[0], store, rank);
    ThreadRank second = rankOf(hubs[1], store, rank);
    body(first, second);
  });
}

void runGrid(int rows, int columns, const std::function<void(int rank, ThreadRank& row, ThreadRank& column)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::shared_ptr<ThreadHub>> rowHubs;
  std::vector<std::shared_ptr<ThreadHub>> columnHubs;
  for (int row = 0; row < rows; ++row) rowHubs.push_back(std::make_shared<ThreadHub>(columns));
  for (int column = 0; column < columns; ++column) columnHubs.push_back(std::make_shared<ThreadHub>(rows));
  runRanks(rows * columns, [&](int rank) {
    ThreadRank row = rankOf(rowHubs[rank / columns], store, rank % columns);
    ThreadRank column = rankOf(columnHubs[rank % columns], store, rank / columns);
    body(rank, row, column);
  });
}

}  // namespace farandole::ddp
