#pragma once

#include "backend/c10d/collective_calls.h"
#include "backend/c10d/cuda/nccl_reductions.h"

namespace farandole::backend {

// Collectives as calls of NCCL's, inside a group of them. What only moves is told as bytes. Between start and end of
// the group; nothing throws that checkReduction() has let through.
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

 private:
  // Calls reduce(dtype, op, bytes of an element) with an operation that exists for as long.
  template <typename Reduce>
  void withReduction(const Reducing& reducing, const Reduce& reduce);
  void send(int peer, Slice data);
  void recv(int peer, Slice data);

  const transport::NcclApi& nccl_;
  transport::NcclGroup& group_;
  ncclComm_t const communicator_;
  cudaStream_t const stream_;
  const int rank_;
  const int size_;
};

}  // namespace farandole::backend
