#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/collective/gathered.h"
#include "backend/collective/program.h"
#include "backend/collective/reduction.h"
#include "backend/collective/topology.h"

namespace farandole::collective {

// Each adds to `program` what one rank does. Every rank must build the same kind
// with the same sizes. Memory is read and written until the program has ended.

// On one host the ranks first tell each other what they are about to do, and
// stop with an error where that differs. The AlgorithmTable says how it goes, there and
// between hosts.

void broadcast(Program& program, Topology topology, int root, Slice data);

// In place. The result is the same bits on every rank.
void allReduce(Program& program, Topology topology, const Reduction& reduction, Slice data);
// The same, of what lies in several places; each may be where its result goes. What ranks that share memory give is
// read where it is. It goes with the other form on other ranks.
void allReduce(Program& program, Topology topology, const Reduction& reduction, const Gathered& input, Slice output);

// The same, of a group that shares memory: of what lies in several places, and in place there.
void allReduceInPlaces(Program& program, Topology topology, const Reduction& reduction, const Gathered& data);

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

// The same, of what lies in several places, in equal parts; each may be where it would lie in `whole`, which may be
// overwritten. `output` may be this rank's part of that.
void reduceScatter(Program& program, Topology topology, const Reduction& reduction, const Gathered& input, Slice whole,
                   Slice output);

// inputs[i] goes to rank i's outputs[rank].
void allToAll(Program& program, Topology topology, std::span<const Slice> outputs, std::span<const Slice> inputs);

void barrier(Program& program, Topology topology);

}  // namespace farandole::collective
