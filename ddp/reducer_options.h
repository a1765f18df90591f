#pragma once

#include <vector>

#include "ddp/grad_check.h"
#include "ddp/gradients.h"
#include "ddp/model_agreement.h"
#include "ddp/model_buffers.h"

namespace farandole::ddp {

// What to do when a parameter gets no gradient in a backward that synchronizes.
// Either way its bucket is reduced with what it holds (zeros, or what no_sync
// accumulated), so that no rank waits for ever and all have the same gradients.
enum class UnusedParameters {
  kError,             // then throw on every rank, naming them
  kErrorInUsedGroup,  // the same, but for groups of buckets that have never got any gradient, as Megatron-core
  kZeroFill,          // zero counts, and is the gradient where no rank has one
  kSkip,              // as torch's find_unused_parameters: where no rank has one, `.grad` stays what it was
};

struct ReducerOptions {
  BufferOptions buffers = {};
  Gradients::Home home = Gradients::Home::kGrad;  // kBucketView where what reduces cannot go with it
  UnusedParameters unused = UnusedParameters::kError;
  bool overlaps = true;              // buckets are issued while backward runs; else all at the end
  bool endsWithBackward = true;      // backward waits for them; else finishSync() does, as in Megatron-core
  bool isAveraged = true;            // else the sum is left, to be divided by a count of tokens
  bool averageInCollective = false;  // by AVG, also where the backend would not be asked for it
  bool accumulatesInFloat = false;   // where sharded: Reduction::Options
  bool isGraphStatic = false;        // a parameter may get several gradients in a backward: the first round counts them
  bool broadcasts = true;            // the model of rank 0 when the reducer is made
  GradCheckOptions checks = {};
  bool isAgreed = false;  // the model and all this are known to be the same on all ranks: making it is no collective
};

// Those that ranks must share.
std::vector<Fact> factsOf(const ReducerOptions& options, const DataParallelGroups& groups);

}  // namespace farandole::ddp
