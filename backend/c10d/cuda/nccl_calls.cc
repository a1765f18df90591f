#include "backend/c10d/cuda/nccl_calls.h"

namespace farandole::backend {
namespace {

// NCCL takes 2048 calls in a group; an exchange between two ranks is two.
constexpr int kExchangesOfGroup = 512;

}  // namespace

template <typename Reduce>
void NcclCalls::withReduction(const Reducing& reducing, const Reduce& reduce) {
  NcclReduction reduction = ncclReductionFor("reduction", reducing);
  if (!reduction.factor) return reduce(reduction);
  const double factor = *reduction.factor;
  const auto single = static_cast<float>(factor);
  const at::Half half(single);
  const at::BFloat16 brain(single);
  // The scalar has the dtype of the data.
  const void* scalar = nullptr;
  switch (reduction.dtype) {
    case ncclFloat64: scalar = &factor; break;
    case ncclFloat16: scalar = &half; break;
    case ncclBfloat16: scalar = &brain; break;
    default: scalar = &single; break;
  }
  const ncclResult_t made = nccl_.redOpCreatePreMulSum(&reduction.op, const_cast<void*>(scalar), reduction.dtype,
                                                       ncclScalarHostImmediate, communicator_);
  group_.add(made, "ncclRedOpCreatePreMulSum");
  if (made != ncclSuccess) return;
  reduce(reduction);
  // It may go as soon as the last call that was given it has returned.
  group_.add(nccl_.redOpDestroy(reduction.op, communicator_), "ncclRedOpDestroy");
}

void NcclCalls::send(int peer, Slice data) {
  if (data.bytes == 0) return;
  group_.add(nccl_.send(data.data, data.bytes, ncclUint8, peer, communicator_, stream_), "ncclSend");
}

void NcclCalls::recv(int peer, Slice data) {
  if (data.bytes == 0) return;
  group_.add(nccl_.recv(data.data, data.bytes, ncclUint8, peer, communicator_, stream_), "ncclRecv");
}

void NcclCalls::broadcast(int root, Slice data) {
  group_.add(nccl_.broadcast(data.data, data.data, data.bytes, ncclUint8, root, communicator_, stream_),
             "ncclBroadcast");
}

void NcclCalls::allReduce(const Reducing& reducing, Slice data) {
  withReduction(reducing, [&](const NcclReduction& reduction) {
    group_.add(nccl_.allReduce(data.data, data.data, data.bytes / reduction.elementBytes, reduction.dtype, reduction.op,
                               communicator_, stream_),
               "ncclAllReduce");
  });
}

void NcclCalls::reduce(const Reducing& reducing, int root, Slice data) {
  withReduction(reducing, [&](const NcclReduction& reduction) {
    group_.add(nccl_.reduce(data.data, data.data, data.bytes / reduction.elementBytes, reduction.dtype, reduction.op,
                            root, communicator_, stream_),
               "ncclReduce");
  });
}

void NcclCalls::allGather(Slice input, std::span<const Slice> outputs, Layout layout) {
  if (layout == Layout::kFlat) {
    group_.add(nccl_.allGather(input.data, outputs[0].data, input.bytes, ncclUint8, communicator_, stream_),
               "ncclAllGather");
    return;
  }
  for (int root = 0; root < size_; ++root) {
    const Slice& output = outputs[root];
    const std::byte* const from = root == rank_ ? input.data : output.data;
    group_.add(nccl_.broadcast(from, output.data, output.bytes, ncclUint8, root, communicator_, stream_),
               "ncclBroadcast");
  }
}

void NcclCalls::gather(int root, Slice input, std::span<const Slice> outputs) {
  send(root, input);
  if (rank_ != root) return;
  for (int peer = 0; peer < size_; ++peer) recv(peer, outputs[peer]);
}

void NcclCalls::scatter(int root, Slice output, std::span<const Slice> inputs) {
  recv(root, output);
  if (rank_ != root) return;
  for (int peer = 0; peer < size_; ++peer) send(peer, inputs[peer]);
}

void NcclCalls::reduceScatter(const Reducing& reducing, Slice output, std::span<const Slice> inputs, Layout layout) {
  withReduction(reducing, [&](const NcclReduction& reduction) {
    if (layout == Layout::kFlat) {
      group_.add(nccl_.reduceScatter(inputs[0].data, output.data, output.bytes / reduction.elementBytes,
                                     reduction.dtype, reduction.op, communicator_, stream_),
                 "ncclReduceScatter");
      return;
    }
    for (int root = 0; root < size_; ++root) {
      const Slice& input = inputs[root];
      std::byte* const into = root == rank_ ? output.data : input.data;
      group_.add(nccl_.reduce(input.data, into, input.bytes / reduction.elementBytes, reduction.dtype, reduction.op,
                              root, communicator_, stream_),
                 "ncclReduce");
    }
  });
}

void NcclCalls::allToAll(std::span<const Slice> outputs, std::span<const Slice> inputs) {
  // In round r ranks i and j with (i + j) mod size = r meet: all cut their groups between the same rounds.
  for (int round = 0; round < size_; ++round) {
    if (round > 0 && round % kExchangesOfGroup == 0) group_.cut();
    const int peer = (round - rank_ + size_) % size_;
    send(peer, inputs[peer]);
    recv(peer, outputs[peer]);
  }
}

}  // namespace farandole::backend
