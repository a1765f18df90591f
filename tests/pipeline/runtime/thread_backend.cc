#include "tests/pipeline/runtime/thread_backend.h"

#include <functional>
#include <stdexcept>
#include <utility>

namespace farandole::pipeline {

namespace {

// Completes when waited for.
class DeferredWork final : public c10d::Work {
 public:
  explicit DeferredWork(std::function<void()> complete) : complete_(std::move(complete)) {}

  bool isCompleted() override { return complete_ == nullptr; }

  bool wait(std::chrono::milliseconds) override {
    if (complete_) complete_();
    complete_ = nullptr;
    return true;
  }

 private:
  std::function<void()> complete_;
};

template <typename Ready>
void waitUntil(ThreadWorld& world, std::unique_lock<std::mutex>& lock, Ready ready) {
  const bool inTime = world.changed.wait_for(lock, std::chrono::seconds(20), [&] { return world.broken || ready(); });
  if (world.broken) throw std::runtime_error("the world is broken");
  if (!inTime) throw std::runtime_error("nothing came within 20 s");
}

}  // namespace

void ThreadBackend::startCoalescing() { isBatchOpen_ = true; }

c10::intrusive_ptr<c10d::Work> ThreadBackend::endCoalescing() {
  isBatchOpen_ = false;
  return c10::make_intrusive<DeferredWork>([batch = std::exchange(batch_, {})] {
    for (const auto& work : batch) work->wait();
  });
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::posted(c10::intrusive_ptr<c10d::Work> work) {
  if (!isBatchOpen_) return work;
  batch_.push_back(std::move(work));
  return nullptr;
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::send(std::vector<at::Tensor>& tensors, int dst, int tag) {
  ++posts;
  const std::lock_guard lock(world_->mutex);
  world_->messages[{getRank(), dst, tag}].push_back(tensors[0].clone());
  world_->changed.notify_all();
  return posted(c10::make_intrusive<DeferredWork>(nullptr));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::recv(std::vector<at::Tensor>& tensors, int src, int tag) {
  ++posts;
  return posted(c10::make_intrusive<DeferredWork>([this, out = tensors[0], src, tag] {
    std::unique_lock lock(world_->mutex);
    auto& queue = world_->messages[{src, getRank(), tag}];
    waitUntil(*world_, lock, [&] { return !queue.empty(); });
    if (queue.front().nbytes() != out.nbytes()) throw std::runtime_error("a message of another size");
    // As bytes: sender and receiver may see other types and shapes in them.
    const auto bytesOf = [](const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); };
    bytesOf(out).copy_(bytesOf(queue.front()));
    queue.pop_front();
  }));
}

int ThreadBackend::contribute(const at::Tensor& tensor) {
  const std::lock_guard lock(world_->mutex);
  auto& all = world_->contributions[collectives_];
  all.resize(world_->size);
  all[getRank()] = tensor.clone();
  world_->changed.notify_all();
  return collectives_++;
}

std::vector<at::Tensor> ThreadBackend::collect(int collective) {
  std::unique_lock lock(world_->mutex);
  auto& all = world_->contributions[collective];
  waitUntil(*world_, lock, [&] {
    for (const at::Tensor& tensor : all) {
      if (!tensor.defined()) return false;
    }
    return true;
  });
  return all;
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                        const c10d::AllreduceOptions& opts) {
  const bool isSum = opts.reduceOp == c10d::ReduceOp::SUM;
  if (!isSum && opts.reduceOp != c10d::ReduceOp::MAX) throw std::runtime_error("only SUM and MAX are here");
  return c10::make_intrusive<DeferredWork>([this, isSum, out = tensors[0], collective = contribute(tensors[0])] {
    if (isSum) out.zero_();
    for (const at::Tensor& tensor : collect(collective)) out.copy_(isSum ? out + tensor : at::maximum(out, tensor));
  });
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                        std::vector<at::Tensor>& inputs,
                                                        const c10d::AllgatherOptions&) {
  return c10::make_intrusive<DeferredWork>([this, outputs = outputs[0], collective = contribute(inputs[0])] {
    const std::vector<at::Tensor> all = collect(collective);
    for (std::size_t i = 0; i < all.size(); ++i) outputs[i].copy_(all[i]);
  });
}

}  // namespace farandole::pipeline
