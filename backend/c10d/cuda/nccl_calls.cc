#include "backend/c10d/cuda/nccl_calls.h"

namespace farandole::backend {
namespace {

constexpr int kExchangesOfGroup = transport::NcclGroup::kMostCalls / 2;

}  // namespace

template <typename Call>
void NcclCalls::issue(const char* name, const Call& call) {
  if (group_.isOpen()) group_.add(call(), name);
}

template <typename Call>
void NcclCalls::collective(const char* name, const Call& call) {
  if (calls_ == transport::NcclGroup::kMostCalls) {
    group_.cut();
    calls_ = 0;
  }
  ++calls_;
  issue(name, call);
}

template <typename Reduce>
void NcclCalls::withReduction(const Reducing& reducing, const Reduce& reduce) {
  const NcclReduction& found = *reducing.nccl;
  Native reduction{static_cast<ncclDataType_t>(found.dtype), found.elementBytes, static_cast<ncclRedOp_t>(found.op)};
  if (!found.factor) return reduce(reduction);
  const double factor = *found.factor;
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
  issue("ncclSend", [&] { return nccl_.send(data.data, data.bytes, ncclUint8, peer, communicator_, stream_); });
}

void NcclCalls::recv(int peer, Slice data) {
  if (data.bytes == 0) return;
  issue("ncclRecv", [&] { return nccl_.recv(data.data, data.bytes, ncclUint8, peer, communicator_, stream_); });
}

void NcclCalls::broadcastFrom(int root, const std::byte* from, Slice data) {
  collective("ncclBroadcast",
             [&] { return nccl_.broadcast(from, data.data, data.bytes, ncclUint8, root, communicator_, stream_); });
}

void NcclCalls::reduceTo(int root, const Native& reduction, Slice data, std::byte* into) {
  collective("ncclReduce", [&] {
    return nccl_.reduce(data.data, into, data.bytes / reduction.elementBytes, reduction.dtype, reduction.op, root,
                        communicator_, stream_);
  });
}

void NcclCalls::broadcast(int root, Slice data) { broadcastFrom(root, data.data, data); }

void NcclCalls::allReduce(const Reducing& reducing, Slice data) {
  withReduction(reducing, [&](const Native& reduction) {
    collective("ncclAllReduce", [&] {
      return nccl_.allReduce(data.data, data.data, data.bytes / reduction.elementBytes, reduction.dtype, reduction.op,
                             communicator_, stream_);
    });
  });
}

void NcclCalls::reduce(const Reducing& reducing, int root, Slice data) {
  withReduction(reducing, [&](const Native& reduction) { reduceTo(root, reduction, data, data.data); });
}

void NcclCalls::allGather(Slice input, std::span<const Slice> outputs, Layout layout) {
  if (layout == Layout::kFlat) {
    collective("ncclAllGather", [&] {
      return nccl_.allGather(input.data, outputs[0].data, input.bytes, ncclUint8, communicator_, stream_);
    });
    return;
  }
  for (int root = 0; root < size_; ++root) {
    broadcastFrom(root, root == rank_ ? input.data : outputs[root].data, outputs[root]);
  }
}

// A rank that is not the root has one message. The root's own is sent in the group in which it is received: NCCL waits
// for such with nothing of a later group.
void NcclCalls::gather(int root, Slice input, std::span<const Slice> outputs) {
  if (rank_ != root) return send(root, input);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer > 0 && peer % kExchangesOfGroup == 0) group_.cut();
    if (peer == root) send(root, input);
    recv(peer, outputs[peer]);
  }
}

void NcclCalls::scatter(int root, Slice output, std::span<const Slice> inputs) {
  if (rank_ != root) return recv(root, output);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer > 0 && peer % kExchangesOfGroup == 0) group_.cut();
    if (peer == root) recv(root, output);
    send(peer, inputs[peer]);
  }
}

void NcclCalls::reduceScatter(const Reducing& reducing, Slice output, std::span<const Slice> inputs, Layout layout) {
  withReduction(reducing, [&](const Native& reduction) {
    if (layout == Layout::kFlat) {
      collective("ncclReduceScatter", [&] {
        return nccl_.reduceScatter(inputs[0].data, output.data, output.bytes / reduction.elementBytes, reduction.dtype,
                                   reduction.op, communicator_, stream_);
      });
      return;
    }
    for (int root = 0; root < size_; ++root) {
      reduceTo(root, reduction, inputs[root], root == rank_ ? output.data : inputs[root].data);
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
