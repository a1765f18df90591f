#include <numeric>

#include "backend/collective/hierarchy/hierarchy.h"
#include "backend/collective/hierarchy/on_host.h"

namespace farandole::collective::hierarchy {
namespace {

// The first rank of the host combines what the others put into their slots, and puts the result into its own.
void allReduceSmall(Program& program, const Place& place, const Contract& contract, const Combiner& sum, Slice data) {
  HostSegment* const host = place.segment();
  HostTurn turn;
  if (host != nullptr) {
    turn = beginTurn(program, *host, contract, 2);
    if (host->index() != 0) {
      program.copy(host->slot(host->index(), turn), data.data, data.bytes);
      program.signal(turn.base + 2);
      program.meet(turn);
      program.awaitRank(0, turn.base + 2);
      program.copy(data.data, host->slot(0, turn), data.bytes);
      return;
    }
    program.signal(turn.base + 1);
    program.meet(turn);
    std::vector<const void*> parts(host->size(), data.data);
    for (int index = 1; index < host->size(); ++index) parts[index] = host->slot(index, turn);
    sum.combine(program, data.data, parts, std::vector<int>(host->size(), 1), data.bytes);
  }
  between::allReduce(place.choose(CollectiveKind::kAllReduce, data.bytes), program, place.lane(), sum, data);
  if (host == nullptr) return;
  program.wait();
  program.copy(host->slot(0, turn), data.data, data.bytes);
  program.signal(turn.base + 2);
}

}  // namespace

void allReduce(Program& program, const Topology& topology, const Reduction& reduction, Slice data) {
  const Place place(topology);
  const Combiner sum(reduction, topology.size);
  const Contract contract{CollectiveKind::kAllReduce, reduction.code, 0, data.bytes};
  if (data.bytes <= kSmallBytes) return allReduceSmall(program, place, contract, sum, data);

  const int lanes = place.lanes();
  HostSegment* const host = place.segment();
  const auto shard = [&](int owner) { return shardOf(owner, lanes, reduction.elementSize, data); };
  const Slice own = place.hasLane() ? shard(place.index()) : Slice{nullptr, 0};
  std::vector<Stream> shards;
  shards.reserve(lanes);
  for (int owner = 0; owner < lanes; ++owner) shards.emplace_back(std::vector{shard(owner)});
  if (host != nullptr) {
    std::vector<int> owners(lanes);
    std::iota(owners.begin(), owners.end(), 0);
    reduceToOwners(program, *host, contract, sum, owners, own.data, shards);
  }
  if (place.hasLane()) {
    between::allReduce(place.choose(CollectiveKind::kAllReduce, own.bytes), program, place.lane(), sum, own);
    program.wait();
  }
  if (host != nullptr) shareBlocks(program, *host, nullptr, shards);
}

}  // namespace farandole::collective::hierarchy
