// The collectives that only move data.
#include "backend/collective/between/between_algorithms.h"
#include "backend/collective/hierarchy/hierarchy.h"
#include "backend/collective/host_algorithms.h"
#include "backend/collective/selection.h"

namespace farandole::collective {
namespace {

void noteAndAnnounce(Program& program, const Topology& topology, const Contract& contract) {
  program.noteCall(contract);
  announce(program, topology, contract);
}

}  // namespace

void broadcast(Program& program, Topology topology, int root, Slice data) {
  const Contract contract{CollectiveKind::kBroadcast, 0, static_cast<std::uint32_t>(root), data.bytes};
  Algorithm algorithm = choose(topology, CollectiveKind::kBroadcast, data.bytes);
  if (HostSegment* const host = topology.wholeSegment()) {
    if (algorithm == Algorithm::kSlots && data.bytes <= HostSegment::kSlotBytes) {
      return broadcastOnHost(program, *host, contract, root, data);
    }
    algorithm = Algorithm::kBinomial;  // messages
  } else {
    program.noteCall(contract);
  }
  if (algorithm == Algorithm::kHierarchical) return hierarchy::broadcast(program, topology, root, data);
  announce(program, topology, contract);
  between::broadcast(algorithm, program, Team::all(topology.rank, topology.size), root, data);
}

void allGather(Program& program, Topology topology, Slice input, std::span<const Slice> outputs) {
  if (topology.wholeSegment() != nullptr) return allGatherOnHost(program, topology, input, outputs);
  const std::size_t bytes = totalBytes(outputs);
  const Contract contract{CollectiveKind::kAllGather, 0, 0, bytes};
  program.noteCall(contract);
  const Algorithm algorithm = choose(topology, CollectiveKind::kAllGather, bytes);
  if (algorithm == Algorithm::kHierarchical) return hierarchy::allGather(program, topology, input, outputs);
  announce(program, topology, contract);
  program.copy(outputs[topology.rank].data, input.data, input.bytes);
  between::Blocks blocks;
  blocks.reserve(outputs.size());
  for (const Slice& output : outputs) blocks.push_back({output});
  between::allGather(algorithm, program, Team::all(topology.rank, topology.size), blocks);
}

void gather(Program& program, Topology topology, int root, Slice input, std::span<const Slice> outputs) {
  if (topology.wholeSegment() != nullptr) return gatherOnHost(program, topology, root, input, outputs);
  noteAndAnnounce(program, topology, {CollectiveKind::kGather, 0, static_cast<std::uint32_t>(root), 0});
  if (topology.rank != root) {
    program.send(root, input.data, input.bytes);
    return;
  }
  for (int i = 1; i < topology.size; ++i) {
    const int source = (root + i) % topology.size;
    program.recv(source, outputs[source].data, outputs[source].bytes);
  }
  program.copy(outputs[root].data, input.data, input.bytes);
}

void scatter(Program& program, Topology topology, int root, Slice output, std::span<const Slice> inputs) {
  if (topology.wholeSegment() != nullptr) return scatterOnHost(program, topology, root, output, inputs);
  noteAndAnnounce(program, topology, {CollectiveKind::kScatter, 0, static_cast<std::uint32_t>(root), 0});
  if (topology.rank != root) {
    program.recv(root, output.data, output.bytes);
    return;
  }
  for (int i = 1; i < topology.size; ++i) {
    const int target = (root + i) % topology.size;
    program.send(target, inputs[target].data, inputs[target].bytes);
  }
  program.copy(output.data, inputs[root].data, inputs[root].bytes);
}

void allToAll(Program& program, Topology topology, std::span<const Slice> outputs, std::span<const Slice> inputs) {
  if (topology.wholeSegment() != nullptr) return allToAllOnHost(program, topology, outputs, inputs);
  noteAndAnnounce(program, topology, {CollectiveKind::kAllToAll, 0, 0, 0});
  const int rank = topology.rank;
  const int size = topology.size;
  for (int i = 1; i < size; ++i) {
    const int source = (rank - i + size) % size;
    program.recv(source, outputs[source].data, outputs[source].bytes);
  }
  for (int i = 1; i < size; ++i) {
    const int target = (rank + i) % size;
    program.send(target, inputs[target].data, inputs[target].bytes);
  }
  program.copy(outputs[rank].data, inputs[rank].data, inputs[rank].bytes);
}

void barrier(Program& program, Topology topology) {
  const Contract contract{CollectiveKind::kBarrier, 0, 0, 0};
  if (topology.wholeSegment() != nullptr) return announce(program, topology, contract);
  program.noteCall(contract);
  if (choose(topology, CollectiveKind::kBarrier, 0) == Algorithm::kHierarchical) {
    return hierarchy::barrier(program, topology);
  }
  announce(program, topology, contract);
  between::barrier(program, Team::all(topology.rank, topology.size));
}

}  // namespace farandole::collective
