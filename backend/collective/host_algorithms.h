#pragma once

#include <string>
#include <vector>

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

// The limits that choose between the forms below, for people: a line for each operation and range.
std::vector<std::string> describeReductionsOnHost();
std::vector<std::string> describeMovementOnHost();

// Up to HostSegment::kSlotBytes.
void broadcastOnHost(Program& program, HostSegment& host, const Contract& contract, int root, Slice data);

// Any size (host_exchange.cc).
void allGatherOnHost(Program& program, HostSegment& host, Slice input, std::span<const Slice> outputs);
void gatherOnHost(Program& program, HostSegment& host, int root, Slice input, std::span<const Slice> outputs);
void scatterOnHost(Program& program, HostSegment& host, int root, Slice output, std::span<const Slice> inputs);
void allToAllOnHost(Program& program, HostSegment& host, std::span<const Slice> outputs, std::span<const Slice> inputs);

// Any size. Without a root (-1) everybody gets the result in `output`, which `input` may be.
void reduceOnHost(Program& program, HostSegment& host, const Reduction& reduction, int root, const Gathered& input,
                  Slice output);
// `bytes`: of the part of each rank, one after another in the input.
void reduceScatterOnHost(Program& program, HostSegment& host, const Reduction& reduction, Slice output,
                         const Gathered& input, std::span<const std::size_t> bytes);

}  // namespace farandole::collective
