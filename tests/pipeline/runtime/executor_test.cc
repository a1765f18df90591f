#include "pipeline/runtime/executor.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <thread>

#include "pipeline/ir/csv.h"
#include "pipeline/ir/stage_graph.h"
#include "pipeline/ir/text.h"
#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"
#include "tests/backend/random_seed.h"
#include "tests/pipeline/runtime/thread_backend.h"

namespace farandole::pipeline {
namespace {

constexpr std::int64_t kWidth = 3;

// A pipeline of stages with y = tanh(x @ w), x the sum of what the stages before it hand over, and its oracle.
struct Model {
  Model(Plan plan, std::uint64_t seed) : plan(std::move(plan)) {
    at::manual_seed(seed);
    for (int stage = 0; stage < this->plan.numStages; ++stage) {
      weights.push_back(at::randn({kWidth, kWidth}).requires_grad_(true));
    }
    for (int i = 0; i < this->plan.numMicrobatches; ++i) {
      // Sizes differ by microbatch, as those of an uneven split.
      inputs.push_back(at::randn({1 + i % 2, kWidth}));
    }
    const StageGraph graph = *StageGraph::make(this->plan);
    for (std::int32_t i = 0; i < graph.numEdges(); ++i) edges.push_back(graph.edge(i));
  }

  bool isFirst(int stage) const { return std::ranges::find(edges, stage, &StageEdge::to) == edges.end(); }
  bool isLast(int stage) const { return std::ranges::find(edges, stage, &StageEdge::from) == edges.end(); }

  // The stage's outputs, all of them; a last stage's loss.
  std::vector<at::Tensor> apply(int stage, const std::vector<at::Tensor>& tensors, const at::Tensor& w) const {
    at::Tensor x = tensors.at(0);
    for (std::size_t i = 1; i < tensors.size(); ++i) x = x + tensors[i] * static_cast<double>(i);
    const at::Tensor h = at::matmul(x, w);
    if (isLast(stage)) return {at::tanh(h).sum()};
    if (!hasTwoOutputs) return {at::tanh(h)};
    return {at::tanh(h), at::sin(h)};
  }

  StageSpec spec(int stage) {
    StageSpec spec;
    spec.index = stage;
    for (const auto& [edge, outputs] : selected) {
      if (edge.from == stage) spec.outputsTo[edge.to] = outputs;
    }
    spec.forward = [this, stage](int microbatch, const std::vector<at::Tensor>& tensors,
                                 std::vector<at::Tensor>& outputs) {
      if (stage == failStage && microbatch == failMicrobatch) throw std::runtime_error("it broke");
      if (isLast(stage) && !isFirst(stage)) addresses.insert(tensors.at(0).data_ptr());
      outputs = apply(stage, isFirst(stage) ? std::vector<at::Tensor>{inputs[microbatch]} : tensors, weights[stage]);
      if (stage == failOutput && outputHook) outputs[0].register_hook(outputHook);
    };
    return spec;
  }

  // The gradients of one step by plain autograd, microbatch by microbatch.
  std::vector<at::Tensor> expected() const {
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& w : weights) leaves.push_back(w.detach().clone().requires_grad_(true));
    for (int microbatch = 0; microbatch < plan.numMicrobatches; ++microbatch) {
      std::vector<std::vector<at::Tensor>> outputs(plan.numStages);
      for (int stage = 0; stage < plan.numStages; ++stage) {
        if (!plan.microbatchesOf(stage).contains(microbatch)) continue;
        std::vector<at::Tensor> tensors;
        if (isFirst(stage)) tensors.push_back(inputs[microbatch]);
        for (const StageEdge& edge : edges) {  // by the stage that they come from
          if (edge.to != stage) continue;
          const auto choice = std::ranges::find(selected, edge, &Selection::first);
          for (std::size_t i = 0; i < outputs[edge.from].size(); ++i) {
            if (choice == selected.end()) tensors.push_back(outputs[edge.from][i]);
          }
          if (choice == selected.end()) continue;
          for (const std::int32_t i : choice->second) tensors.push_back(outputs[edge.from][i]);
        }
        outputs[stage] = apply(stage, tensors, leaves[stage]);
        if (isLast(stage)) outputs[stage][0].backward({}, /*retain_graph=*/true);
      }
    }
    std::vector<at::Tensor> grads;
    for (const at::Tensor& w : leaves) grads.push_back(w.grad());
    return grads;
  }

  void zeroGrad() {
    for (at::Tensor& w : weights) w.mutable_grad().reset();
  }

  void expectGradients() const {
    const std::vector<at::Tensor> grads = expected();
    for (std::size_t stage = 0; stage < grads.size(); ++stage) {
      ASSERT_TRUE(weights[stage].grad().defined()) << "stage " << stage;
      EXPECT_TRUE(at::allclose(weights[stage].grad(), grads[stage], 1e-5, 1e-6)) << "stage " << stage;
    }
  }

  using Selection = std::pair<StageEdge, std::vector<std::int32_t>>;

  Plan plan;
  std::vector<StageEdge> edges;  // of the plan
  std::vector<at::Tensor> weights, inputs;
  bool hasTwoOutputs = false;       // but for last stages
  std::vector<Selection> selected;  // for some edges
  std::set<const void*> addresses;  // of the last stage's inputs
  int failStage = -1, failMicrobatch = -1;
  int failOutput = -1;  // the stage whose outputs get the hook
  std::function<at::Tensor(const at::Tensor&)> outputHook;
};

class Ranks {
 public:
  explicit Ranks(Model& model)
      : abandoned(model.plan.numRanks()), world_(std::make_shared<ThreadWorld>(model.plan.numRanks())) {
    for (int rank = 0; rank < world_->size; ++rank) {
      ExecutorConfig config;
      for (int stage = 0; stage < model.plan.numStages; ++stage) {
        if (model.plan.rankOfStage[stage] == rank) config.stages.push_back(model.spec(stage));
      }
      for (StageSpec& spec : config.stages) {
        spec.abandonGradSync = [this, rank](const std::string& reason) { abandoned[rank].push_back(reason); };
      }
      backends.push_back(c10::make_intrusive<ThreadBackend>(world_, rank));
      Result<std::unique_ptr<Executor>> executor =
          Executor::create(model.plan, rank, backends.back(), std::move(config));
      if (!executor) throw std::runtime_error(executor.status().toString());
      executors.push_back(std::move(executor).value());
    }
  }

  std::vector<Status> step(bool relearn = false) {
    std::vector<Status> statuses(executors.size());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < executors.size(); ++rank) {
      threads.emplace_back([&, rank] { statuses[rank] = executors[rank]->step(relearn); });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

  void stepOk(bool relearn = false) {
    for (const Status& status : step(relearn)) ASSERT_TRUE(status.isOk()) << status.toString();
  }

  void breakWorld() {
    world_->broken = true;
    world_->changed.notify_all();
  }

  std::vector<c10::intrusive_ptr<ThreadBackend>> backends;
  std::vector<std::unique_ptr<Executor>> executors;
  std::vector<std::vector<std::string>> abandoned;  // by rank: reasons for which its stages abandoned reductions

 private:
  std::shared_ptr<ThreadWorld> world_;
};

// Stages dealt out round robin, all forwards, then all backwards.
Plan interleaved(int ranks, int stages, int microbatches) {
  Plan plan{stages, microbatches, {}, std::vector<std::vector<Action>>(ranks)};
  for (int stage = 0; stage < stages; ++stage) plan.rankOfStage.push_back(stage % ranks);
  for (int stage = 0; stage < stages; ++stage) {
    for (int i = 0; i < microbatches; ++i) plan.ranks[stage % ranks].push_back({stage, ActionKind::kForward, i, {}});
  }
  for (int stage = stages - 1; stage >= 0; --stage) {
    for (int i = 0; i < microbatches; ++i) plan.ranks[stage % ranks].push_back({stage, ActionKind::kBackward, i, {}});
  }
  return plan;
}

// Any schedule with counts that it can run.
Plan randomPlan(std::string_view name, std::mt19937_64& rng) {
  while (true) {
    const int ranks = 1 + static_cast<int>(rng() % 4);
    const int stages = ranks * (1 + static_cast<int>(rng() % 3));
    const int microbatches = 1 + static_cast<int>(rng() % 12);
    Result<Plan> plan = makePlan(name, {ranks, stages, microbatches, false});
    if (plan) return *lower(*plan, ChannelModel::kTagged);
  }
}

TEST(Executor, TrainsAsPlainAutogradDoesByEverySchedule) {
  const std::uint64_t seed = testing::someSeed();
  std::mt19937_64 rng(seed);
  for (const std::string_view name : scheduleNames()) {
    for (int round = 0; round < 3; ++round) {
      Model model(randomPlan(name, rng), rng());
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(name) + ", " +
                   std::to_string(model.plan.numRanks()) + " ranks, " + std::to_string(model.plan.numStages) +
                   " stages, " + std::to_string(model.plan.numMicrobatches) + " microbatches");
      Ranks all(model);
      for (int step = 0; step < 3; ++step) {
        model.zeroGrad();
        all.stepOk(step == 2);
        model.expectGradients();
      }
    }
  }
}

// Edges from lower to higher stages; all stages but the first have one into them.
std::vector<StageEdge> randomEdges(int stages, std::mt19937_64& rng) {
  std::vector<StageEdge> edges;
  for (int to = 1; to < stages; ++to) {
    const int always = static_cast<int>(rng() % to);
    for (int from = 0; from < to; ++from) {
      if (from == always || rng() % 4 == 0) edges.push_back({from, to});
    }
  }
  return edges;
}

TEST(Executor, TrainsAnyGraphOfStagesByEverySchedule) {
  const std::uint64_t seed = testing::someSeed();
  std::mt19937_64 rng(seed);
  for (const std::string_view name : scheduleNames()) {
    if (name == "DualPipe") continue;  // two copies: see the test above
    for (int round = 0; round < 4; ++round) {
      const Plan chain = randomPlan(name, rng);
      ScheduleOptions options{chain.numRanks(), chain.numStages, chain.numMicrobatches, false};
      options.edges = randomEdges(chain.numStages, rng);
      Model model(*lower(*makePlan(name, options), ChannelModel::kTagged), rng());
      model.hasTwoOutputs = rng() % 3 != 0;
      for (const StageEdge& edge : *options.edges) {
        if (!model.hasTwoOutputs || rng() % 2 == 0) continue;
        if (rng() % 3 == 0) {
          model.selected.push_back({edge, {1, 0}});
        } else {
          model.selected.push_back({edge, {static_cast<std::int32_t>(rng() % 2)}});
        }
      }
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(name) + ", " + toCsv(model.plan));
      Ranks all(model);
      for (int step = 0; step < 3; ++step) {
        model.zeroGrad();
        all.stepOk(step == 2);
        model.expectGradients();
      }
      model.failStage = static_cast<int>(rng() % model.plan.numStages);
      model.failMicrobatch = static_cast<int>(rng() % model.plan.numMicrobatches);
      for (const Status& status : all.step(rng() % 2 == 0)) EXPECT_EQ(status.code(), StatusCode::kInternal);
      model.failStage = -1;
      model.zeroGrad();
      all.stepOk();
      model.expectGradients();
    }
  }
}

TEST(Executor, AnOutputThatIsNotThereCannotGoAnywhere) {
  Model model(*lower(*makePlan("GPipe", {2, 2, 2, false})), 7);
  model.selected.push_back({{0, 1}, {1}});
  Ranks all(model);
  for (const Status& status : all.step()) {
    EXPECT_NE(status.toString().find("returned 1 tensors, expected more: output 1 goes to stage 1"), std::string::npos)
        << status.toString();
  }
}

TEST(Executor, RunsSeveralStagesOnARank) {
  for (const auto& [ranks, stages] : {std::pair{1, 1}, {1, 3}, {2, 4}, {3, 7}}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(stages) + " stages");
    Model model(*lower(interleaved(ranks, stages, 3), ChannelModel::kTagged), 7);
    Ranks all(model);
    for (int step = 0; step < 2; ++step) {
      model.zeroGrad();
      all.stepOk();
      model.expectGradients();
    }
  }
}

TEST(Executor, AFailureIsReturnedOnEveryRankAndTheNextStepRuns) {
  for (const bool learned : {false, true}) {
    for (int stage = 0; stage < 4; ++stage) {
      for (int microbatch = 0; microbatch < 3; ++microbatch) {
        SCOPED_TRACE("stage " + std::to_string(stage) + " microbatch " + std::to_string(microbatch));
        Model model(*lower(interleaved(2, 4, 3), ChannelModel::kTagged), 7);
        Ranks all(model);
        if (learned) all.stepOk();
        model.failStage = stage;
        model.failMicrobatch = microbatch;
        for (const Status& status : all.step()) {
          EXPECT_EQ(status.code(), StatusCode::kInternal);
          const std::string where = "rank " + std::to_string(stage % 2) + ", stage " + std::to_string(stage) +
                                    ", microbatch " + std::to_string(microbatch) + ": forward: it broke";
          EXPECT_NE(status.toString().find(where), std::string::npos) << status.toString();
          EXPECT_EQ(status.toString().find("after that"), std::string::npos) << status.toString();
        }
        model.failStage = -1;
        model.zeroGrad();
        all.stepOk();
        model.expectGradients();
      }
    }
  }
}

TEST(Executor, AFailureInAnyHalfOfABackwardIsReturnedAndTheNextStepRuns) {
  for (const char* name : {"ZB-H1", "ZBV", "InterleavedZeroBubble"}) {
    for (const bool inWeights : {false, true}) {
      SCOPED_TRACE(std::string(name) + (inWeights ? ", W" : ", I"));
      const int stages = std::string_view(name) == "ZB-H1" ? 2 : 4;
      Model model(*lower(*makePlan(name, {2, stages, 6, false}), ChannelModel::kTagged), 7);
      Ranks all(model);
      all.stepOk();
      int calls = 0;
      const auto fails = [&calls](const at::Tensor& grad) -> at::Tensor {
        if (++calls == 3) throw std::runtime_error("it broke");
        return grad;
      };
      model.failOutput = 1;
      if (inWeights) {
        model.weights[1].register_hook(fails);
      } else {
        model.outputHook = fails;
      }
      const std::string where = inWeights ? "stage 1, microbatch 2: backward for the weights: it broke"
                                          : "stage 1, microbatch 2: backward for the inputs: it broke";
      for (const Status& status : all.step()) {
        EXPECT_EQ(status.code(), StatusCode::kInternal);
        EXPECT_NE(status.toString().find(where), std::string::npos) << status.toString();
      }
      model.zeroGrad();
      all.stepOk();
      model.expectGradients();
    }
  }
}

TEST(Executor, ReceivesIntoTheSameBuffersStepAfterStep) {
  Model model(*lower(*makePlan("1F1B", {2, 2, 8, false})), 7);
  Ranks all(model);
  all.stepOk();
  model.addresses.clear();
  for (int step = 0; step < 5; ++step) all.stepOk();
  // The last stage of 1F1B holds one microbatch and receives the next: two buffers of each size.
  EXPECT_LE(model.addresses.size(), 4u);
}

TEST(Executor, SendsOneMessagePerTensorOnceShapesAreKnown) {
  constexpr int kMicrobatches = 5;
  Model model(*lower(*makePlan("GPipe", {2, 2, kMicrobatches, false})), 7);
  Ranks all(model);
  all.stepOk();
  EXPECT_EQ(all.backends[0]->posts, 3 * kMicrobatches);  // header, activation, gradient
  all.backends[0]->posts = 0;
  all.stepOk();
  EXPECT_EQ(all.backends[0]->posts, 2 * kMicrobatches);
}

TEST(Executor, ABrokenTransportIsAnErrorNowAndLater) {
  Model model(*lower(*makePlan("1F1B", {2, 2, 4, false})), 7);
  Ranks all(model);
  all.stepOk();
  all.breakWorld();
  for (int step = 0; step < 2; ++step) {
    for (const Status& status : all.step()) {
      EXPECT_EQ(status.code(), StatusCode::kPeerFailed);
      EXPECT_NE(status.toString().find("the world is broken"), std::string::npos) << status.toString();
    }
  }
}

TEST(Executor, TellsReductionOfGradientsWhichBackwardIsTheLast) {
  Plan plan = *lower(*makePlan("1F1B", {1, 1, 3, false}));
  std::vector<std::string> events;
  StageSpec spec;
  spec.requireGradSync = [&](bool required) { events.push_back(required ? "on" : "off"); };
  const at::Tensor weight = at::ones({1}).requires_grad_(true);
  weight.register_hook([&](const at::Tensor&) { events.push_back("backward"); });
  spec.forward = [&](int, const std::vector<at::Tensor>&, std::vector<at::Tensor>& outputs) {
    outputs.push_back(weight * 2);
  };
  ExecutorConfig config;
  config.stages.push_back(spec);
  auto executor = Executor::create(plan, 0, nullptr, std::move(config));
  ASSERT_TRUE(executor);
  ASSERT_TRUE(executor.value()->step(false).isOk());
  EXPECT_EQ(events, (std::vector<std::string>{"off", "backward", "backward", "on", "backward"}));
}

TEST(Executor, EachRankThatWillNotFinishAStepAbandonsItsReductionAndOnlyThen) {
  constexpr int kRanks = 3;
  constexpr int kFailing = 1;
  for (const bool learned : {false, true}) {
    Model model(*lower(*makePlan("1F1B", {kRanks, kRanks, 4, false})), 7);
    Ranks all(model);
    all.stepOk();
    for (const auto& reasons : all.abandoned) EXPECT_TRUE(reasons.empty());
    model.failStage = kFailing;
    model.failMicrobatch = 2;
    for (const Status& status : all.step(/*relearn=*/!learned)) EXPECT_EQ(status.code(), StatusCode::kInternal);
    const std::string reason = "rank 1, stage 1, microbatch 2: forward: it broke";
    EXPECT_EQ(all.abandoned[kFailing], (std::vector<std::string>{reason}));
    // Those before it get zeros as gradients, and finish. Those after it, too, where shapes are known.
    EXPECT_TRUE(all.abandoned[0].empty());
    const std::string after = "rank 2: a stage before stage 2 of its pipeline failed";
    EXPECT_EQ(all.abandoned[2], learned ? std::vector<std::string>{} : std::vector<std::string>{after});

    model.failStage = -1;
    all.stepOk();
    for (auto& reasons : all.abandoned) reasons.clear();
    all.breakWorld();
    all.step();
    for (const auto& reasons : all.abandoned) {
      ASSERT_EQ(reasons.size(), 1u);
      EXPECT_NE(reasons[0].find("the world is broken"), std::string::npos) << reasons[0];
    }
  }
}

TEST(Executor, ARefusedStepAbandonsNothing) {
  Model model(*lower(*makePlan("1F1B", {2, 2, 4, false})), 7);
  Ranks all(model);
  std::thread other([&] { EXPECT_FALSE(all.executors[1]->step(false).isOk()); });
  EXPECT_FALSE(all.executors[0]->refuse("bad arguments").isOk());
  other.join();
  for (const auto& reasons : all.abandoned) EXPECT_TRUE(reasons.empty());
  all.stepOk();
}

TEST(Executor, RefusesStagesThatThePlanDoesNotPlaceThere) {
  const Plan plan = *lower(*makePlan("GPipe", {1, 1, 2, false}));
  EXPECT_EQ(Executor::create(plan, 0, nullptr, {}).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace farandole::pipeline
