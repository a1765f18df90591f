#include "backend/collective/hierarchy/hierarchy.h"
#include "backend/collective/hierarchy/on_host.h"

namespace farandole::collective::hierarchy {
namespace {

// Of the chain of leaders: receives all pieces from the one before, and hands each on when it has come.
class ChainLink {
 public:
  ChainLink(Program& program, const Team& team, int root, Slice data) : program_(program), team_(team), data_(data) {
    hasNext_ = team.after(1) != root;
    if (team.index == root) return;
    for (std::size_t i = 0; i * kPieceBytes < data.bytes; ++i) {
      recvs_.push_back(program.recv(team.ranks[team.before(1)], piece(i).data, piece(i).bytes));
    }
  }

  void pass(std::size_t i) {
    if (piece(i).bytes == 0) return;
    if (!recvs_.empty()) program_.waitFor(recvs_[i]);
    if (hasNext_) program_.send(team_.ranks[team_.after(1)], piece(i).data, piece(i).bytes);
  }
  void passAll() {
    for (std::size_t i = 0; i * kPieceBytes < data_.bytes; ++i) pass(i);
  }

 private:
  Slice piece(std::size_t i) const {
    const std::size_t first = std::min(i * kPieceBytes, data_.bytes);
    return {data_.data + first, std::min(kPieceBytes, data_.bytes - first)};
  }

  Program& program_;
  const Team& team_;
  const Slice data_;
  bool hasNext_;
  std::vector<int> recvs_;
};

}  // namespace

// Through one rank of each host, which on the root's is the root.
void broadcast(Program& program, const Topology& topology, int root, Slice data) {
  const Place place(topology);
  const Contract contract{CollectiveKind::kBroadcast, 0, static_cast<std::uint32_t>(root), data.bytes};
  HostSegment* const host = place.segment();
  const int leader = place.leaderIndex(root);
  const auto nothing = [](std::size_t) {};
  if (place.index() != leader) return passOn(program, *host, contract, leader, data, nothing);

  const Team team = place.leaders(root);
  const int rootHost = place.layout().hostOf(root);
  const Algorithm algorithm = place.choose(CollectiveKind::kBroadcast, data.bytes);
  if (algorithm == Algorithm::kChain) {
    ChainLink link(program, team, rootHost, data);
    if (host == nullptr) return link.passAll();
    return passOn(program, *host, contract, leader, data, [&](std::size_t i) { link.pass(i); });
  }
  if (host == nullptr) return between::broadcast(algorithm, program, team, rootHost, data);
  passOn(program, *host, contract, leader, data, [&](std::size_t i) {
    if (i == 0) between::broadcast(algorithm, program, team, rootHost, data);
  });
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
    for (const int rank : layout.ranksOf(place.host())) local.emplace_back(std::vector{outputs[rank]});
    shareBlocks(program, *place.segment(), &contract, local);
  }
  if (place.hasLane()) {
    between::Blocks blocks;
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
