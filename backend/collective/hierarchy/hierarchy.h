#pragma once

#include <span>
#include <vector>

#include "backend/collective/between/between_algorithms.h"
#include "backend/collective/host_layout.h"
#include "backend/collective/topology.h"

// The collectives of groups that span hosts, with several ranks on some: in the memory of
// each host first, then between the hosts, then in the memory again. Large data is cut into
// shards, one for each of as many ranks as every host has, and each shard goes between the
// hosts on a lane of its own: that of the ranks with the same index on their hosts.
//
// The ranks of a host compare what they called before any data moves.
namespace farandole::collective::hierarchy {

// Up to here a host's data goes through one rank, in one piece.
inline constexpr std::size_t kSmallBytes = 32 << 10;

// This rank's place in the hierarchy.
class Place {
 public:
  explicit Place(const Topology& topology)
      : layout_(*topology.layout),
        table_(*topology.table),
        segment_(topology.segment),
        depth_(topology.depth),
        rank_(topology.rank) {}

  const HostLayout& layout() const { return layout_; }
  // Null for a rank that is alone on its host.
  HostSegment* segment() const { return segment_; }
  int host() const { return layout_.hostOf(rank_); }
  int index() const { return layout_.indexOf(rank_); }
  int lanes() const { return layout_.fewestRanks(); }
  bool hasLane() const { return index() < lanes(); }
  // The ranks with this rank's index, one of each host; for hasLane().
  Team lane() const;
  // One rank of each host: `special`, and of other hosts than its the first. This rank is one of them.
  Team leaders(int special) const;
  int leaderIndex(int special) const { return layout_.hostOf(special) == host() ? layout_.indexOf(special) : 0; }
  // What goes on between the hosts.
  Algorithm choose(CollectiveKind operation, std::size_t bytes) const {
    return table_.choose(operation, {bytes, layout_.numHosts(), layout_.numHosts(), 1});
  }

 private:
  std::vector<int> ranksOnHosts() const;

  const HostLayout& layout_;
  const AlgorithmTable& table_;
  HostSegment* const segment_;
  ExchangeDepth* const depth_;
  const int rank_;
};

void allReduce(Program& program, const Topology& topology, const Reduction& reduction, Slice data);
void reduce(Program& program, const Topology& topology, const Reduction& reduction, int root, Slice data);
void broadcast(Program& program, const Topology& topology, int root, Slice data);
void allGather(Program& program, const Topology& topology, Slice input, std::span<const Slice> outputs);
void reduceScatter(Program& program, const Topology& topology, const Reduction& reduction, Slice output,
                   std::span<const Slice> inputs);
void barrier(Program& program, const Topology& topology);

}  // namespace farandole::collective::hierarchy
