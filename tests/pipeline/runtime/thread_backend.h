#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>
#include <vector>

namespace farandole::pipeline {

// What the ranks of one test share: each rank is a thread of this process.
struct ThreadWorld {
  explicit ThreadWorld(int size) : size(size) {}

  using Key = std::tuple<int, int, int>;  // source, destination, tag

  int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Key, std::deque<at::Tensor>> messages;
  std::map<int, std::vector<at::Tensor>> contributions;  // [collective][rank]
  bool broken = false;
};

// A c10d backend between threads, for tensors on any device whose default stream
// they share: buffered sends, receives and collectives that complete in wait().
// Any wait for a world that is broken throws.
class ThreadBackend : public c10d::Backend {
 public:
  ThreadBackend(std::shared_ptr<ThreadWorld> world, int rank) : Backend(rank, world->size), world_(std::move(world)) {}

  const std::string getBackendName() const override { return "threads"; }

  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int dst, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int src, int tag) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;

  int posts = 0;  // sends and receives

 private:
  // As it is, or as a part of the batch that is open.
  c10::intrusive_ptr<c10d::Work> posted(c10::intrusive_ptr<c10d::Work> work);
  int contribute(const at::Tensor& tensor);
  std::vector<at::Tensor> collect(int collective);

  std::shared_ptr<ThreadWorld> world_;
  int collectives_ = 0;
  bool isBatchOpen_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> batch_;
};

}  // namespace farandole::pipeline
