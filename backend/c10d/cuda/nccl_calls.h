#pragma once

#include "backend/c10d/collective_calls.h"
#include "backend/transport/nccl/nccl_communicator.h"

namespace farandole::backend {

// Collectives as calls of NCCL's, inside a group of them, which it cuts where there are more than NCCL takes; after one
// that fails it makes no more. What only moves is told as bytes. Between start and end of the group; nothing throws.
class NcclCalls final : public CollectiveCalls {
 public:
  NcclCalls(const transport::NcclApi& nccl, transport::NcclGroup& group, ncclComm_t communicator, cudaStream_t stream,
            int rank, int size)
      : nccl_(nccl), group_(group), communicator_(communicator), stream_(stream), rank_(rank), size_(size) {}

  void broadcast(int root, Slice data) override;
  void allReduce(const Reducing& reducing, Slice data) override;
  void reduce(const Reducing& reducing, int root, Slice data) override;
  void allGather(Slice input, std::span<const Slice> outputs, Layout layout) override;
  void gather(int root, Slice input, std::span<const Slice> outputs) override;
  void scatter(int root, Slice output, std::span<const Slice> inputs) override;
  void reduceScatter(const Reducing& reducing, Slice output, std::span<const Slice> inputs, Layout layout) override;
  void allToAll(std::span<const Slice> outputs, std::span<const Slice> inputs) override;
  void then(std::function<void()>) override { TORCH_INTERNAL_ASSERT(false, "of the CPU alone"); }

 private:
  // A reduction in NCCL's types.
  struct Native {
    ncclDataType_t dtype;
    std::size_t elementBytes;
    ncclRedOp_t op;
  };
  // Calls reduce(native) with an operation that exists for as long.
  template <typename Reduce>
  void withReduction(const Reducing& reducing, const Reduce& reduce);
  template <typename Call>
  void issue(const char* name, const Call& call);
  // The same of one that all ranks make alike.
  template <typename Call>
  void collective(const char* name, const Call& call);
  void broadcastFrom(int root, const std::byte* from, Slice data);
  void reduceTo(int root, const Native& reduction, Slice data, std::byte* into);
  void send(int peer, Slice data);
  void recv(int peer, Slice data);

  const transport::NcclApi& nccl_;
  transport::NcclGroup& group_;
  ncclComm_t const communicator_;
  cudaStream_t const stream_;
  const int rank_;
  const int size_;
  int calls_ = 0;  // of those that all ranks make alike, in this group of NCCL's
};

}  // namespace farandole::backend
