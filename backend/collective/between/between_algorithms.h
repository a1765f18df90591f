#pragma once

#include <span>

#include "backend/collective/algorithm_table.h"
#include "backend/collective/between/team.h"
#include "backend/collective/reduction.h"

// The collectives by messages among the ranks of a team: one file for each of the
// algorithms that the AlgorithmTable chooses from. In those that reduce, each element
// is either combined by one rank, which hands the result out, or by all in the same
// order: the result is the same bits everywhere.
namespace farandole::collective::between {

// In place; for teams of any size, one included.
void allReduce(Algorithm algorithm, Program& program, const Team& team, const Combiner& sum, Slice data);

// Everybody sends everything to everybody. One round; for two ranks also the least traffic.
void allReduceFlat(Program& program, const Team& team, const Combiner& sum, Slice data);

// Rank i exchanges all data with i xor 1, i xor 2, i xor 4 and so on, ceil(log2(size))
// rounds. Of more ranks than a power of two, pairs fold into one before and unfold
// after: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", 2005.
void allReduceRecursiveDoubling(Program& program, const Team& team, const Combiner& sum, Slice data);

// Reduce-scatter by recursive halving, all-gather by recursive doubling, with the same
// folding (the same article, after R. Rabenseifner, 1997): 2 log2(size) rounds of
// twice the data in all.
void allReduceRabenseifner(Program& program, const Team& team, const Combiner& sum, Slice data);

// Every rank reduces a shard that all others send to it, and sends the result to all:
// two rounds, in chunks, each rank with every other.
void allReduceDirect(Program& program, const Team& team, const Combiner& sum, Slice data);

// Shards pass around a ring and are added up on the way, then pass around once more: as
// little traffic as there can be, and each rank hears of two others only. P. Patarasuk,
// X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
// The chunks of a shard follow each other without waiting for the round.
void allReduceRing(Program& program, const Team& team, const Combiner& sum, Slice data);

// To the root, an index of the team; what the others have is left as it was.
void reduce(Algorithm algorithm, Program& program, const Team& team, const Combiner& sum, int root, Slice data);
void reduceFlat(Program& program, const Team& team, const Combiner& sum, int root, Slice data);
void reduceDirect(Program& program, const Team& team, const Combiner& sum, int root, Slice data);

void broadcast(Algorithm algorithm, Program& program, const Team& team, int root, Slice data);
// A tree: ceil(log2(size)) rounds of all data. What comes after it in the program finds the data there.
void broadcastBinomial(Program& program, const Team& team, int root, Slice data);
// From each to the next in chunks: all links are busy at a time, none carries data twice.
void broadcastChain(Program& program, const Team& team, int root, Slice data);

// blocks[i] is what the rank with index i gives, in pieces; this one's are there already.
using Blocks = std::vector<std::vector<Slice>>;
void allGather(Algorithm algorithm, Program& program, const Team& team, const Blocks& blocks);
void allGatherDirect(Program& program, const Team& team, const Blocks& blocks);
void allGatherRing(Program& program, const Team& team, const Blocks& blocks);

// inputs[i] goes to index i, which combines what it gets with its own in the order of the team.
void reduceScatterDirect(Program& program, const Team& team, const Combiner& sum, Slice output,
                         std::span<const Slice> inputs);

// Dissemination: ceil(log2(size)) rounds.
void barrier(Program& program, const Team& team);

}  // namespace farandole::collective::between
