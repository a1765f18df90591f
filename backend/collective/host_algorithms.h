#pragma once

#include "backend/collective/algorithm_table.h"
#include "backend/collective/algorithms.h"

// The forms of the collectives over memory that the ranks of a host share. Those of
// groups that span hosts use them too: a rank is named by its index in the segment.
namespace farandole::collective {

// Waits until the memory can be written for this turn, and tells the contract.
HostTurn beginTurn(Program& program, HostSegment& host, const Contract& contract, std::uint64_t steps);
// Nothing but meeting the other ranks of this host, before messages are sent.
void announce(Program& program, const Topology& topology, const Contract& contract);
std::size_t totalBytes(std::span<const Slice> slices);
std::size_t longestBytes(std::span<const Slice> slices);

// Up to HostSegment::kSlotBytes.
void broadcastOnHost(Program& program, HostSegment& host, const Contract& contract, int root, Slice data);

// Of a group that is in one segment; any size, as the table says (host_exchange.cc).
void allGatherOnHost(Program& program, const Topology& topology, Slice input, std::span<const Slice> outputs);
void gatherOnHost(Program& program, const Topology& topology, int root, Slice input, std::span<const Slice> outputs);
void scatterOnHost(Program& program, const Topology& topology, int root, Slice output, std::span<const Slice> inputs);
void allToAllOnHost(Program& program, const Topology& topology, std::span<const Slice> outputs,
                    std::span<const Slice> inputs);

// The same. Without a root (-1) everybody gets the result in `output`, which `input` may be.
void reduceOnHost(Program& program, const Topology& topology, const Reduction& reduction, int root,
                  const Gathered& input, const Gathered& output);
// `bytes`: of the part of each rank, one after another in the input.
void reduceScatterOnHost(Program& program, const Topology& topology, const Reduction& reduction, Slice output,
                         const Gathered& input, std::span<const std::size_t> bytes);

}  // namespace farandole::collective
