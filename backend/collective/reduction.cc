// The collectives that reduce. All add in the order of the ranks, so that the
// result depends neither on who computes it nor on the size.
#include <algorithm>

#include "backend/collective/host_algorithms.h"

namespace farandole::collective {
namespace {

// Up to here all data goes to everybody: one round instead of two, `size` times the traffic.
constexpr std::size_t kFlatBytes = 32 << 10;
// What a rank reduces at a time, of each peer, so that it is still in the cache.
constexpr std::size_t kChunkBytes = 512 << 10;

bool isFlat(int size, std::size_t bytes) { return bytes * (size - 1) <= kFlatBytes; }

// The part of `data` that `rank` reduces in a direct reduce-scatter.
Slice shardOf(int rank, int size, std::size_t elementSize, Slice data) {
  const std::size_t elements = data.bytes / elementSize;
  const std::size_t first = elements * rank / size;
  const std::size_t last = elements * (rank + 1) / size;
  return {data.data + first * elementSize, (last - first) * elementSize};
}

Slice chunkOf(Slice shard, std::size_t chunk, std::size_t chunkBytes) {
  const std::size_t first = std::min(chunk * chunkBytes, shard.bytes);
  return {shard.data + first, std::min(chunkBytes, shard.bytes - first)};
}

// Posts the receives of every other rank's part into `scratch` and returns all
// parts by rank, the own one included.
std::vector<const void*> recvParts(Program& program, Topology topology, Slice own, std::byte* scratch) {
  std::vector<const void*> parts(topology.size);
  for (int i = 1; i < topology.size; ++i) {
    const int source = (topology.rank - i + topology.size) % topology.size;
    program.recv(source, scratch, own.bytes);
    parts[source] = scratch;
    scratch += own.bytes;
  }
  parts[topology.rank] = own.data;
  return parts;
}

std::vector<const void*> recvParts(Program& program, Topology topology, Slice own) {
  return recvParts(program, topology, own, program.scratch(own.bytes * (topology.size - 1)));
}

void allReduceFlat(Program& program, Topology topology, const Reduction& reduction, Slice data) {
  const std::vector<const void*> parts = recvParts(program, topology, data);
  for (int i = 1; i < topology.size; ++i) program.send((topology.rank + i) % topology.size, data.data, data.bytes);
  program.wait();  // also for the sends: the result overwrites what they read
  program.reduce(reduction.function, data.data, parts, data.bytes / reduction.elementSize);
}

// Enough for the largest shard, and the same on every rank: a chunk of a smaller shard may be empty.
std::size_t numChunks(std::size_t bytes, int size) {
  return std::max<std::size_t>(1, (bytes / size + kChunkBytes) / kChunkBytes);
}

// Chunk by chunk: exchange, reduce, and hand out the result while the next
// chunk is exchanged. Without `gatherTo` everybody gets the result.
void reduceDirect(Program& program, Topology topology, const Reduction& reduction, Slice data, int gatherTo) {
  const int rank = topology.rank;
  const int size = topology.size;
  const std::size_t chunks = numChunks(data.bytes, size);
  const std::size_t chunkBytes = kChunkBytes / reduction.elementSize * reduction.elementSize;
  const auto piece = [&](int owner, std::size_t chunk) {
    return chunkOf(shardOf(owner, size, reduction.elementSize, data), chunk, chunkBytes);
  };
  // Two, in turn: one is reduced while the other is filled.
  const std::size_t scratchBytes = std::min(chunkBytes, data.bytes / size + reduction.elementSize) * (size - 1);
  std::byte* const scratch[] = {program.scratch(scratchBytes), program.scratch(scratchBytes)};
  std::vector<const void*> parts;
  std::vector<const void*> nextParts;
  for (std::size_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) {
      nextParts = recvParts(program, topology, piece(rank, chunk), scratch[chunk % 2]);
      for (int i = 1; i < size; ++i) {
        const Slice out = piece((rank + i) % size, chunk);
        program.send((rank + i) % size, out.data, out.bytes);
      }
    }
    if (chunk > 0) {
      const Slice own = piece(rank, chunk - 1);
      program.reduce(reduction.function, own.data, parts, own.bytes / reduction.elementSize);
      for (int i = 1; i < size; ++i) {
        const int other = (rank + i) % size;
        const Slice in = piece(other, chunk - 1);
        if (gatherTo < 0 || gatherTo == rank) program.recv(other, in.data, in.bytes);
        if (gatherTo < 0 || gatherTo == other) program.send(other, own.data, own.bytes);
      }
    }
    program.wait();
    parts.swap(nextParts);
  }
}

}  // namespace

void allReduce(Program& program, Topology topology, const Reduction& reduction, Slice data) {
  if (topology.host != nullptr) return reduceOnHost(program, topology, reduction, -1, data);
  if (topology.size == 1 || data.bytes == 0) {
    const void* const own = data.data;
    program.reduce(reduction.function, data.data, {&own, 1}, data.bytes / reduction.elementSize);
  } else if (isFlat(topology.size, data.bytes)) {
    allReduceFlat(program, topology, reduction, data);
  } else {
    reduceDirect(program, topology, reduction, data, -1);
  }
}

void reduce(Program& program, Topology topology, const Reduction& reduction, int root, Slice data) {
  if (topology.host != nullptr) return reduceOnHost(program, topology, reduction, root, data);
  if (topology.size == 1 || data.bytes == 0) {
    allReduce(program, topology, reduction, data);
    return;
  }
  if (isFlat(topology.size, data.bytes)) {
    if (topology.rank != root) {
      program.send(root, data.data, data.bytes);
      return;
    }
    const std::vector<const void*> parts = recvParts(program, topology, data);
    program.wait();
    program.reduce(reduction.function, data.data, parts, data.bytes / reduction.elementSize);
    return;
  }
  Slice target = data;
  if (topology.rank != root) {  // what is not the root's result stays untouched
    target.data = program.scratch(data.bytes);
    program.copy(target.data, data.data, data.bytes);
  }
  reduceDirect(program, topology, reduction, target, root);
}

void reduceScatter(Program& program, Topology topology, const Reduction& reduction, Slice output,
                   std::span<const Slice> inputs) {
  if (topology.host != nullptr) return reduceScatterOnHost(program, topology, reduction, output, inputs);
  const int rank = topology.rank;
  const int size = topology.size;
  std::vector<const void*> parts = recvParts(program, topology, {inputs[rank].data, output.bytes});
  for (int i = 1; i < size; ++i) {
    const int target = (rank + i) % size;
    program.send(target, inputs[target].data, inputs[target].bytes);
  }
  program.wait();
  program.reduce(reduction.function, output.data, parts, output.bytes / reduction.elementSize);
}

}  // namespace farandole::collective
