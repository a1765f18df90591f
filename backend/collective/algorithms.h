#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/collective/program.h"

namespace farandole::collective {

// Where a program is built for. With `host` all ranks share memory.
struct Topology {
  int rank;
  int size;
  HostSegment* host = nullptr;
};

// A piece of memory, in bytes.
struct Slice {
  std::byte* data;
  std::size_t bytes;
};

struct Reduction {
  ReduceFunction function;
  std::size_t elementSize;  // bytes
  std::uint16_t code = 0;   // dtype and operation, for ranks to compare
};

// Each adds to `program` what one rank does. Every rank must build the same kind
// with the same sizes. Memory is read and written until the program has ended.

// On one host the ranks first tell each other what they are about to do, and
// stop with an error where that differs. Data that reduces, and small data, goes
// through the memory that they share; large data from process to process.

// Binomial tree from the root.
void broadcast(Program& program, Topology topology, int root, Slice data);

// In place. Small: everybody sends to everybody and adds in rank order. Large:
// direct reduce-scatter and all-gather in chunks that stay in the cache. The
// result is the same bits on every rank, whatever the size.
void allReduce(Program& program, Topology topology, const Reduction& reduction, Slice data);

// In place on the root; the other ranks' memory is left as it was.
void reduce(Program& program, Topology topology, const Reduction& reduction, int root, Slice data);

// outputs[i] is what rank i gave; sizes may differ from rank to rank.
void allGather(Program& program, Topology topology, Slice input, std::span<const Slice> outputs);

// `outputs` is read on the root only.
void gather(Program& program, Topology topology, int root, Slice input, std::span<const Slice> outputs);

// `inputs` is read on the root only.
void scatter(Program& program, Topology topology, int root, Slice output, std::span<const Slice> inputs);

// inputs[i] goes to rank i, which reduces what it gets, in rank order.
void reduceScatter(Program& program, Topology topology, const Reduction& reduction, Slice output,
                   std::span<const Slice> inputs);

// inputs[i] goes to rank i's outputs[rank].
void allToAll(Program& program, Topology topology, std::span<const Slice> outputs, std::span<const Slice> inputs);

// Dissemination: ceil(log2(size)) rounds.
void barrier(Program& program, Topology topology);

}  // namespace farandole::collective
