#include "ddp/reducer_options.h"

#include <string>

namespace farandole::ddp {
namespace {

const char* nameOf(UnusedParameters policy) {
  switch (policy) {
    case UnusedParameters::kError: return "error";
    case UnusedParameters::kErrorInUsedGroup: return "error in a used bucket group";
    case UnusedParameters::kZeroFill: return "zero_fill";
    case UnusedParameters::kSkip: return "skip";
  }
  TORCH_INTERNAL_ASSERT(false, "farandole.ddp: UnusedParameters ", static_cast<int>(policy));
}

}  // namespace

std::vector<Fact> factsOf(const ReducerOptions& options, const DataParallelGroups& groups) {
  const auto yes = [](bool value) { return std::string(value ? "True" : "False"); };
  const BufferOptions& buffers = options.buffers;
  return {{"bucket_size", buffers.isBucketed ? std::to_string(bucketSizeOf(buffers, groups)) : "none"},
          {"disable_bucketing", yes(buffers.inOneGroup)},
          {"unused_parameters", nameOf(options.unused)},
          {"gradient type", buffers.gradType ? at::toString(*buffers.gradType) : "the parameter's"},
          {"use_distributed_optimizer", yes(buffers.sharded)},
          {"pad_buckets_for_high_nccl_busbw", yes(buffers.padForBusBandwidth)},
          {"overlap_grad_reduce", yes(options.overlaps)},
          {"average_in_collective", yes(options.averageInCollective)},
          {"reduce_scatter_with_fp32_accumulation", yes(options.accumulatesInFloat)},
          {"static_graph", yes(options.isGraphStatic)},
          {"init_sync", yes(options.broadcasts)},
          {"gradients are averaged", yes(options.isAveraged)},
          {"optimizer instances", std::to_string(groups.dense.instances ? groups.dense.instances->getSize() : 1)}};
}

}  // namespace farandole::ddp
