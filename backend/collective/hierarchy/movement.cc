#include "backend/collective/hierarchy/hierarchy.h"
#include "backend/collective/hierarchy/on_host.h"

namespace farandole::collective::hierarchy {
namespace {

// From one leader to the next, and from each to the ranks of its host: chunk by chunk, so that all of it goes on at a
// time. On a host each rank copies out of its leader's memory by itself.
void broadcastAlongChain(Program& program, const Place& place, const Team& leaders, int leader, int rootHost,
                         Slice data) {
  const Chunks chunks(data.bytes, 1);
  const std::vector<int>& here = place.layout().ranksOf(place.host());
  const bool isLeader = place.index() == leader;
  std::vector<int> recvs;
  if (!isLeader || place.host() != rootHost) {
    const int from = isLeader ? leaders.ranks[leaders.before(1)] : here[leader];
    for (std::size_t i = 0; i < chunks.count(); ++i) {
      recvs.push_back(program.recv(from, chunks.of(data, i).data, chunks.of(data, i).bytes));
    }
  }
  if (!isLeader) return;
  const bool hasNext = leaders.after(1) != rootHost;
  for (std::size_t i = 0; i < chunks.count(); ++i) {
    const Slice chunk = chunks.of(data, i);
    if (!recvs.empty()) program.waitFor(recvs[i]);
    if (hasNext) program.send(leaders.ranks[leaders.after(1)], chunk.data, chunk.bytes);
    for (const int rank : here) {
      if (rank != here[leader]) program.send(rank, chunk.data, chunk.bytes);
    }
  }
}

}  // namespace

// Through one rank of each host, which on the root's is the root.
void broadcast(Program& program, const Topology& topology, int root, Slice data) {
  const Place place(topology);
  const int rootHost = place.layout().hostOf(root);
  const int leader = place.leaderIndex(root);
  const Team leaders = place.leaders(root);
  const Contract contract{CollectiveKind::kBroadcast, 0, static_cast<std::uint32_t>(root), data.bytes};
  const Algorithm algorithm = place.choose(CollectiveKind::kBroadcast, data.bytes);
  if (algorithm == Algorithm::kChain) {
    announce(program, topology, contract);
    return broadcastAlongChain(program, place, leaders, leader, rootHost, data);
  }
  HostSegment* const host = place.segment();
  if (host == nullptr) return between::broadcast(algorithm, program, leaders, rootHost, data);
  if (data.bytes > HostSegment::kSlotBytes) {
    announce(program, topology, contract);
    if (place.index() == leader) between::broadcast(algorithm, program, leaders, rootHost, data);
    return between::broadcastBinomial(program, {place.layout().ranksOf(place.host()), place.index()}, leader, data);
  }
  const HostTurn turn = beginTurn(program, *host, contract, 2);
  program.signal(turn.base + (place.index() == leader ? 1 : 2));
  program.meet(turn);
  if (place.index() == leader) {
    between::broadcast(algorithm, program, leaders, rootHost, data);
    program.copy(host->slot(leader, turn), data.data, data.bytes);
    program.signal(turn.base + 2);
  } else {
    program.awaitRank(leader, turn.base + 2);
    program.copy(data.data, host->slot(leader, turn), data.bytes);
  }
}

// A lane carries what the ranks with its index give, and those that have no lane of their own.
void allGather(Program& program, const Topology& topology, Slice input, std::span<const Slice> outputs) {
  const Place place(topology);
  const HostLayout& layout = place.layout();
  const int lanes = place.lanes();
  const auto blockOf = [&](int host, int lane) {
    std::vector<Slice> slices;
    const std::vector<int>& ranks = layout.ranksOf(host);
    for (std::size_t i = lane; i < ranks.size(); i += lanes) slices.push_back(outputs[ranks[i]]);
    return slices;
  };
  program.copy(outputs[topology.rank].data, input.data, input.bytes);
  if (place.segment() != nullptr) {
    const Contract contract{CollectiveKind::kAllGather, 0, 0, totalBytes(outputs)};
    std::vector<Stream> local;
    local.reserve(layout.ranksOf(place.host()).size());
    for (const int rank : layout.ranksOf(place.host())) local.emplace_back(std::vector{outputs[rank]});
    shareBlocks(program, *place.segment(), &contract, local);
  }
  if (place.hasLane()) {
    between::Blocks blocks;
    blocks.reserve(layout.numHosts());
    for (int host = 0; host < layout.numHosts(); ++host) blocks.push_back(blockOf(host, place.index()));
    between::allGather(place.choose(CollectiveKind::kAllGather, totalBytes(outputs)), program, place.lane(), blocks);
    program.wait();
  }
  if (place.segment() == nullptr) return;
  std::vector<Stream> remote;
  for (int lane = 0; lane < lanes; ++lane) {
    std::vector<Slice> slices;
    for (int host = 0; host < layout.numHosts(); ++host) {
      if (host == place.host()) continue;
      for (const Slice& slice : blockOf(host, lane)) slices.push_back(slice);
    }
    remote.emplace_back(std::move(slices));
  }
  shareBlocks(program, *place.segment(), nullptr, remote);
}

void barrier(Program& program, const Topology& topology) {
  const Place place(topology);
  HostSegment* const host = place.segment();
  HostTurn turn;
  if (host != nullptr) {
    turn = beginTurn(program, *host, {CollectiveKind::kBarrier, 0, 0, 0}, 2);
    program.signal(turn.base + (host->index() == 0 ? 1 : 2));
    program.meet(turn);
    if (host->index() != 0) return program.awaitRank(0, turn.base + 2);
  }
  between::barrier(program, place.lane());
  if (host != nullptr) program.signal(turn.base + 2);
}

}  // namespace farandole::collective::hierarchy
