// The collectives that only move data.
#include <algorithm>

#include "backend/collective/host_algorithms.h"

namespace farandole::collective {

void broadcast(Program& program, Topology topology, int root, Slice data) {
  if (topology.host != nullptr && data.bytes <= HostSegment::kSlotBytes) {
    return broadcastOnHost(program, topology, root, data);
  }
  announce(program, topology, {CollectiveKind::kBroadcast, 0, static_cast<std::uint32_t>(root), data.bytes});
  const int rank = topology.rank;
  const int size = topology.size;
  const int relative = (rank - root + size) % size;
  int mask = 1;
  for (; mask < size; mask <<= 1) {
    if ((relative & mask) == 0) continue;
    program.recv((relative - mask + root) % size, data.data, data.bytes);
    program.wait();
    break;
  }
  for (mask >>= 1; mask > 0; mask >>= 1) {
    if (relative + mask < size) program.send((relative + mask + root) % size, data.data, data.bytes);
  }
}

void allGather(Program& program, Topology topology, Slice input, std::span<const Slice> outputs) {
  if (topology.host != nullptr && std::ranges::max(outputs, {}, &Slice::bytes).bytes <= HostSegment::kSlotBytes) {
    return allGatherOnHost(program, topology, input, outputs);
  }
  announce(program, topology, {CollectiveKind::kAllGather, 0, 0, totalBytes(outputs)});
  const int rank = topology.rank;
  const int size = topology.size;
  for (int i = 1; i < size; ++i) {
    const int source = (rank - i + size) % size;
    program.recv(source, outputs[source].data, outputs[source].bytes);
  }
  for (int i = 1; i < size; ++i) program.send((rank + i) % size, input.data, input.bytes);
  program.copy(outputs[rank].data, input.data, input.bytes);
}

void gather(Program& program, Topology topology, int root, Slice input, std::span<const Slice> outputs) {
  announce(program, topology, {CollectiveKind::kGather, 0, static_cast<std::uint32_t>(root), 0});
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
  announce(program, topology, {CollectiveKind::kScatter, 0, static_cast<std::uint32_t>(root), 0});
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
  announce(program, topology, {CollectiveKind::kAllToAll, 0, 0, 0});
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
  if (topology.host != nullptr) return announce(program, topology, {CollectiveKind::kBarrier, 0, 0, 0});
  const int rank = topology.rank;
  const int size = topology.size;
  for (int distance = 1; distance < size; distance <<= 1) {
    program.recv((rank - distance + size) % size, nullptr, 0);
    program.send((rank + distance) % size, nullptr, 0);
    program.wait();
  }
}

}  // namespace farandole::collective
