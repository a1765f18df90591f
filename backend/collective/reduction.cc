// The collectives that reduce.
#include <algorithm>
#include <iterator>

#include "backend/collective/between/between_algorithms.h"
#include "backend/collective/hierarchy/hierarchy.h"
#include "backend/collective/host_algorithms.h"
#include "backend/collective/selection.h"

namespace farandole::collective {
namespace {

void copyTogether(Program& program, const Gathered& input, Slice output) {
  input.forEach(0, output.bytes, [&](std::size_t place, Slice part) {
    if (part.data != output.data + place) program.copy(output.data + place, part.data, part.bytes);
  });
}

}  // namespace

void allReduce(Program& program, Topology topology, const Reduction& reduction, const Gathered& input, Slice output) {
  if (topology.wholeSegment() != nullptr) {
    return reduceOnHost(program, topology, reduction, -1, input, Gathered({&output, 1}));
  }
  copyTogether(program, input, output);
  allReduce(program, topology, reduction, output);
}

void allReduce(Program& program, Topology topology, const Reduction& reduction, Slice data) {
  if (topology.wholeSegment() != nullptr) return allReduceInPlaces(program, topology, reduction, Gathered({&data, 1}));
  const Contract contract{CollectiveKind::kAllReduce, reduction.code, 0, data.bytes};
  program.noteCall(contract);
  const Algorithm algorithm = choose(topology, CollectiveKind::kAllReduce, data.bytes);
  if (algorithm == Algorithm::kHierarchical) return hierarchy::allReduce(program, topology, reduction, data);
  announce(program, topology, contract);
  Team team = Team::all(topology.rank, topology.size);
  team.depth = topology.depth;
  between::allReduce(algorithm, program, team, Combiner(reduction, topology.size), data);
}

void allReduceInPlaces(Program& program, Topology topology, const Reduction& reduction, const Gathered& data) {
  reduceOnHost(program, topology, reduction, -1, data, data);
}

void reduce(Program& program, Topology topology, const Reduction& reduction, int root, Slice data) {
  if (topology.wholeSegment() != nullptr) {
    const Gathered all({&data, 1});
    return reduceOnHost(program, topology, reduction, root, all, all);
  }
  const Contract contract{CollectiveKind::kReduce, reduction.code, static_cast<std::uint32_t>(root), data.bytes};
  program.noteCall(contract);
  const Algorithm algorithm = choose(topology, CollectiveKind::kReduce, data.bytes);
  if (algorithm == Algorithm::kHierarchical) return hierarchy::reduce(program, topology, reduction, root, data);
  announce(program, topology, contract);
  between::reduce(algorithm, program, Team::all(topology.rank, topology.size), Combiner(reduction, topology.size), root,
                  data);
}

void reduceScatter(Program& program, Topology topology, const Reduction& reduction, const Gathered& input, Slice whole,
                   Slice output) {
  if (topology.wholeSegment() != nullptr) {
    const std::vector<std::size_t> sizes(topology.size, output.bytes);
    return reduceScatterOnHost(program, topology, reduction, output, input, sizes);
  }
  copyTogether(program, input, whole);
  std::vector<Slice> parts;
  parts.reserve(topology.size);
  for (int rank = 0; rank < topology.size; ++rank) {
    parts.push_back({whole.data + rank * output.bytes, output.bytes});
  }
  reduceScatter(program, topology, reduction, output, parts);
}

void reduceScatter(Program& program, Topology topology, const Reduction& reduction, Slice output,
                   std::span<const Slice> inputs) {
  if (topology.wholeSegment() != nullptr) {
    std::vector<std::size_t> sizes;
    std::ranges::transform(inputs, std::back_inserter(sizes), &Slice::bytes);
    return reduceScatterOnHost(program, topology, reduction, output, Gathered(inputs), sizes);
  }
  const std::size_t bytes = totalBytes(inputs);
  const Contract contract{CollectiveKind::kReduceScatter, reduction.code, 0, bytes};
  program.noteCall(contract);
  if (choose(topology, CollectiveKind::kReduceScatter, bytes) == Algorithm::kHierarchical) {
    return hierarchy::reduceScatter(program, topology, reduction, output, inputs);
  }
  announce(program, topology, contract);
  between::reduceScatterDirect(program, Team::all(topology.rank, topology.size), Combiner(reduction, topology.size),
                               output, inputs);
}

}  // namespace farandole::collective
