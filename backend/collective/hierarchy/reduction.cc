#include <numeric>

#include "backend/collective/hierarchy/hierarchy.h"
#include "backend/collective/hierarchy/on_host.h"

namespace farandole::collective::hierarchy {

// Through one rank of each host, which on the root's is the root.
void reduce(Program& program, const Topology& topology, const Reduction& reduction, int root, Slice data) {
  const Place place(topology);
  const Combiner sum(reduction, topology.size);
  const int leader = place.leaderIndex(root);
  const bool isLeader = place.index() == leader;
  Slice combined = data;
  if (place.segment() != nullptr) {
    // What is not the root's result stays untouched.
    if (isLeader && topology.rank != root) combined.data = program.scratch(data.bytes);
    const Contract contract{CollectiveKind::kReduce, reduction.code, static_cast<std::uint32_t>(root), data.bytes};
    const Stream input({data});
    reduceToOwners(program, *place.segment(), contract, sum, {&leader, 1}, combined.data, {&input, 1});
  }
  if (!isLeader) return;
  between::reduce(place.choose(CollectiveKind::kReduce, data.bytes), program, place.leaders(root), sum,
                  place.layout().hostOf(root), combined);
}

// A lane carries what the ranks with its index get, and those that have no lane of their
// own: they get it from the rank of their host that has it.
void reduceScatter(Program& program, const Topology& topology, const Reduction& reduction, Slice output,
                   std::span<const Slice> inputs) {
  const Place place(topology);
  const HostLayout& layout = place.layout();
  const Combiner sum(reduction, topology.size);
  const int lanes = place.lanes();
  const int lane = place.index() % lanes;
  const auto ranksOn = [&](int host, int ofLane) {
    std::vector<int> ranks;
    const std::vector<int>& all = layout.ranksOf(host);
    for (std::size_t i = ofLane; i < all.size(); i += lanes) ranks.push_back(all[i]);
    return ranks;
  };
  std::vector<Stream> streams;  // by lane
  for (int i = 0; i < lanes; ++i) {
    std::vector<Slice> slices;
    for (int host = 0; host < layout.numHosts(); ++host) {
      for (const int rank : ranksOn(host, i)) slices.push_back(inputs[rank]);
    }
    streams.emplace_back(std::move(slices));
  }
  std::byte* const combined = place.hasLane() ? program.scratch(streams[lane].bytes()) : nullptr;
  if (place.segment() != nullptr) {
    std::vector<int> owners(lanes);
    std::iota(owners.begin(), owners.end(), 0);
    const Contract contract{CollectiveKind::kReduceScatter, reduction.code, 0, totalBytes(inputs)};
    reduceToOwners(program, *place.segment(), contract, sum, owners, combined, streams);
  } else {
    streams[0].forEach(0, streams[0].bytes(), [&](Slice slice, std::size_t offset) {
      program.copy(combined + offset, slice.data, slice.bytes);
    });
  }
  if (!place.hasLane()) {
    program.recv(layout.ranksOf(place.host())[lane], output.data, output.bytes);
    return;
  }

  std::vector<Slice> toHosts;
  std::byte* at = combined;
  for (int host = 0; host < layout.numHosts(); ++host) {
    std::size_t bytes = 0;
    for (const int rank : ranksOn(host, lane)) bytes += inputs[rank].bytes;
    toHosts.push_back({at, bytes});
    at += bytes;
  }
  const Slice results = toHosts[place.host()];
  const std::vector<int> here = ranksOn(place.host(), lane);
  between::reduceScatterDirect(program, place.lane(), sum, here.size() == 1 ? output : results, toHosts);
  if (here.size() == 1) return;
  program.copy(output.data, results.data, output.bytes);
  at = results.data + output.bytes;
  for (std::size_t i = 1; i < here.size(); ++i) {
    program.send(here[i], at, inputs[here[i]].bytes);
    at += inputs[here[i]].bytes;
  }
}

}  // namespace farandole::collective::hierarchy
