#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <random>

#include "pipeline/ir/action_kind.h"
#include "tests/pipeline/runtime/executor_model.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

WeakStorage weakStorageOf(const at::Tensor& tensor) {
  return WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
}

// What the stages of one rank have saved: for the inputs' gradients, for the weights', and what they returned.
struct Saved {
  std::vector<WeakStorage> forInputs, forWeights, outputs;

  static int alive(const std::vector<WeakStorage>& storages) {
    return static_cast<int>(std::ranges::count_if(storages, [](const WeakStorage& one) { return !one.expired(); }));
  }
};

struct Held {
  int forInputs = 0, forWeights = 0;
  bool operator==(const Held&) const = default;
};

// What the rank holds when each of its forwards has ended, by the plan alone.
std::vector<Held> expectedAfterForwards(const Plan& plan, int rank) {
  std::vector<Held> after;
  Held held;
  for (const Action& action : plan.ranks[rank]) {
    for (const Action& leaf : leaves(action)) {
      if (isForward(leaf.kind)) {
        ++held.forInputs;
        ++held.forWeights;
        after.push_back(held);
      } else if (leaf.kind == ActionKind::kBackward) {
        --held.forInputs;
        --held.forWeights;
      } else if (leaf.kind == ActionKind::kBackwardInput && leaf.stage != 0) {
        --held.forInputs;  // the first stage has no such half
      } else if (leaf.kind == ActionKind::kBackwardWeight) {
        --held.forWeights;
        if (leaf.stage == 0) --held.forInputs;
      }
    }
  }
  return after;
}

TEST(ExecutorMemory, OnlyWhatThePlanSaysIsHeld) {
  const std::uint64_t seed = testing::someSeed();
  std::mt19937_64 rng(seed);
  for (const std::string_view name : scheduleNames()) {
    if (name == "DualPipe") continue;  // has two first stages
    const Plan plan = randomPlan(name, rng);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(name) + ", " + std::to_string(plan.numRanks()) +
                 " ranks, " + std::to_string(plan.numStages) + " stages, " + std::to_string(plan.numMicrobatches) +
                 " microbatches");
    Model model(plan, rng());
    std::vector<Saved> saved(plan.numRanks());
    std::vector<std::vector<Held>> seen(plan.numRanks());
    std::vector<int> outputsHeld(plan.numRanks(), 0);
    Ranks all(model, [&](int stage) {
      StageSpec spec;
      spec.index = stage;
      const int rank = plan.rankOfStage[stage];
      const bool isLocal = stage + 1 < plan.numStages && plan.rankOfStage[stage + 1] == rank;
      spec.forward = [&, stage, rank, isLocal](int microbatch, const std::vector<at::Tensor>& tensors,
                                               std::vector<at::Tensor>& outputs) {
        Saved& mine = saved[rank];
        outputsHeld[rank] = std::max(outputsHeld[rank], Saved::alive(mine.outputs));
        const at::Tensor x = (stage == 0 ? model.inputs[microbatch] : tensors.at(0)) * 2;
        const at::Tensor y = at::tanh(at::matmul(x, model.weights[stage]));
        mine.forWeights.push_back(weakStorageOf(x));
        mine.forInputs.push_back(weakStorageOf(y));
        seen[rank].push_back({Saved::alive(mine.forInputs), Saved::alive(mine.forWeights)});
        outputs.push_back(stage + 1 == plan.numStages ? y.sum() : y + 1);
        if (!isLocal) mine.outputs.push_back(weakStorageOf(outputs[0]));
      };
      return spec;
    });
    for (int step = 0; step < 2; ++step) {
      for (int rank = 0; rank < plan.numRanks(); ++rank) {
        seen[rank].clear();
        saved[rank] = {};
        outputsHeld[rank] = 0;
      }
      all.stepOk();
      for (int rank = 0; rank < plan.numRanks(); ++rank) {
        EXPECT_EQ(seen[rank], expectedAfterForwards(plan, rank)) << "rank " << rank << ", step " << step;
        // An output is let go with the next message that is posted, once it has left.
        EXPECT_LE(outputsHeld[rank], 1) << "rank " << rank << ", step " << step;
        EXPECT_EQ(Saved::alive(saved[rank].forInputs) + Saved::alive(saved[rank].forWeights), 0);
      }
    }
  }
}

}  // namespace
}  // namespace farandole::pipeline
