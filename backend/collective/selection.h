#pragma once

#include "backend/collective/algorithm_table.h"
#include "backend/collective/host_layout.h"
#include "backend/collective/topology.h"

namespace farandole::collective {

inline Algorithm choose(const Topology& topology, CollectiveKind operation, std::size_t bytes) {
  static const AlgorithmTable defaults;
  const AlgorithmTable& table = topology.table != nullptr ? *topology.table : defaults;
  if (topology.wholeSegment() != nullptr) return table.choose(operation, {bytes, topology.size, 1, topology.size});
  const HostLayout* const layout = topology.layout;
  return table.choose(operation, {bytes, topology.size, layout != nullptr ? layout->numHosts() : topology.size,
                                  layout != nullptr ? layout->mostRanks() : 1});
}

}  // namespace farandole::collective
