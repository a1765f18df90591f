#include "pipeline/runtime/edge_sizes.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <numeric>

namespace farandole::pipeline {
namespace {

std::int64_t bytesOf(const TensorMeta& meta) {
  const auto elementSize = static_cast<std::int64_t>(c10::elementSize(meta.dtype));
  return std::accumulate(meta.sizes.begin(), meta.sizes.end(), elementSize, std::multiplies<>());
}

std::int64_t total(const EdgeSizes& sizes) {
  return std::accumulate(sizes.activation.begin(), sizes.activation.end(), std::int64_t{0});
}

EdgeSizes sizesOver(Stage& stage, std::size_t link, const MicrobatchSlot& slot) {
  EdgeSizes sizes{{stage.spec.index, stage.program.outOf[link].other}, {}, {}};
  for (const std::int32_t i : stage.outputsOver(link, slot.outputMetas.size())) {
    const TensorMeta& meta = slot.outputMetas[i];
    sizes.activation.push_back(bytesOf(meta));
    if (meta.requiresGrad) sizes.gradient.push_back(bytesOf(meta));
  }
  return sizes;
}

}  // namespace

std::vector<EdgeSizes> edgeSizes(std::vector<Stage>& stages) {
  std::vector<EdgeSizes> edges;
  for (Stage& stage : stages) {
    for (std::size_t link = 0; link < stage.program.outOf.size(); ++link) {
      std::vector<EdgeSizes> seen;
      for (const MicrobatchSlot& slot : stage.slots) {
        if (slot.outputsKnown) seen.push_back(sizesOver(stage, link, slot));
      }
      if (seen.empty()) continue;
      const auto median = seen.begin() + static_cast<std::ptrdiff_t>(seen.size() / 2);
      std::ranges::nth_element(seen, median, {}, total);
      edges.push_back(std::move(*median));
    }
  }
  return edges;
}

}  // namespace farandole::pipeline
