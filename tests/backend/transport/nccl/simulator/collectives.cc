#include "tests/backend/transport/nccl/simulator/collectives.h"

#include <cstring>

namespace farandole::testing {
namespace {

Bytes read(const void* from, std::size_t size) {
  const auto* const bytes = static_cast<const std::byte*>(from);
  return Bytes(bytes, bytes + size);
}

void write(void* to, const Bytes& from, std::size_t offset, std::size_t size) {
  std::memcpy(to, from.data() + offset, size);
}

}  // namespace

void runCollective(const std::vector<const CollectiveCall*>& calls) {
  using Kind = CollectiveCall::Kind;
  const CollectiveCall& call = *calls[0];
  const std::size_t ranks = calls.size();
  const std::size_t size = call.count * elementSize(call.dtype);
  const auto root = static_cast<std::size_t>(call.root);
  const bool manyIn = call.kind == Kind::kReduceScatter;

  std::vector<Bytes> inputs(ranks);
  std::vector<Operator> operators;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    operators.push_back(calls[rank]->op);
    if (call.kind == Kind::kBroadcast && rank != root) continue;  // its send buffer means nothing
    inputs[rank] = read(calls[rank]->send, manyIn ? size * ranks : size);
  }
  Bytes reduced;
  if (call.kind == Kind::kAllReduce || call.kind == Kind::kReduce || call.kind == Kind::kReduceScatter) {
    reduced = reduce(inputs, operators, call.dtype);
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    void* const to = calls[rank]->receive;
    switch (call.kind) {
      case Kind::kAllReduce: write(to, reduced, 0, size); break;
      case Kind::kReduce:
        if (rank == root) write(to, reduced, 0, size);
        break;
      case Kind::kBroadcast: write(to, inputs[root], 0, size); break;
      case Kind::kReduceScatter: write(to, reduced, rank * size, size); break;
      case Kind::kAllGather:
        for (std::size_t from = 0; from < ranks; ++from) {
          write(static_cast<std::byte*>(to) + from * size, inputs[from], 0, size);
        }
        break;
    }
  }
}

}  // namespace farandole::testing
