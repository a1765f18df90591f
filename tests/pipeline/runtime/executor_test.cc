#include "pipeline/runtime/executor.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "tests/pipeline/runtime/executor_model.h"

namespace farandole::pipeline {
namespace {

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

TEST(Executor, EachLossCountsForItsScaleOfThisStep) {
  Model model(*lower(interleaved(2, 4, 3), ChannelModel::kTagged), 7);
  Ranks all(model);
  for (const std::vector<double>& scales : {std::vector<double>{0.5, 0.25, 0.25}, {0, 1, 3}, {}, {2, 2, 2}}) {
    model.lossScales = scales;
    model.zeroGrad();
    all.stepOk();
    model.expectGradients();
  }
  model.lossScales = {1, 2};
  for (const Status& status : all.step()) {
    EXPECT_NE(status.toString().find("lossScales has 2 entries, expected 3"), std::string::npos) << status.toString();
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

// The same shape in every microbatch, declared by every stage.
StageSpec declaredSpec(Model& model, int stage) {
  const TensorMeta meta{{2, kWidth}, at::kDouble};
  StageSpec spec = model.spec(stage);
  if (!model.isFirst(stage)) spec.declaredInputs = {meta};
  if (!model.isLast(stage)) spec.declaredOutputs = {meta};
  return spec;
}

TEST(Executor, LearnsNoShapesWhereAllAreDeclared) {
  constexpr int kMicrobatches = 5;
  for (const char* name : {"GPipe", "ZBV"}) {
    const int stages = name == std::string_view("ZBV") ? 4 : 2;
    Model model(*lower(*makePlan(name, {2, stages, kMicrobatches, false}), ChannelModel::kTagged), 7);
    for (at::Tensor& input : model.inputs) input = at::randn({2, kWidth}, at::kDouble);
    Ranks all(
        model, [&](int stage) { return declaredSpec(model, stage); },
        [](int, ExecutorConfig& config) { config.areShapesDeclared = true; });
    all.stepOk();
    model.expectGradients();
    const int edges = name == std::string_view("ZBV") ? 2 : 1;             // between the ranks
    EXPECT_EQ(all.backends[0]->posts, 2 * kMicrobatches * edges) << name;  // activations and gradients
    // After a failure shapes are learned, and are those that were declared.
    model.zeroGrad();
    model.failStage = 1;
    model.failMicrobatch = 2;
    for (const Status& status : all.step()) EXPECT_NE(status.toString().find("it broke"), std::string::npos);
    model.failStage = -1;
    for (int step = 0; step < 2; ++step) {
      model.zeroGrad();
      all.stepOk();
      model.expectGradients();
    }
  }
}

TEST(Executor, RefusesADeclarationThatLacksAShape) {
  Model model(*lower(*makePlan("GPipe", {2, 2, 3, false})), 7);
  const auto make = [&] {
    const Ranks all(
        model, [&](int stage) { return stage == 1 ? model.spec(stage) : declaredSpec(model, stage); },
        [](int, ExecutorConfig& config) { config.areShapesDeclared = true; });
  };
  EXPECT_THROW(
      {
        try {
          make();
        } catch (const std::runtime_error& error) {
          EXPECT_NE(std::string(error.what()).find("the shapes of stage 1 are not all declared"), std::string::npos);
          throw;
        }
      },
      std::runtime_error);
}

TEST(Executor, RanksThatDifferInWhatMustBeAlikeAreTold) {
  Model model(*lower(*makePlan("1F1B", {3, 3, 4, false})), 7);
  Ranks all(
      model, [&](int stage) { return model.spec(stage); },
      [](int rank, ExecutorConfig& config) {
        config.alike = rank == 1 ? 2 : 1;
        config.description = "step of rank " + std::to_string(rank);
      });
  for (const Status& status : all.step()) {
    EXPECT_NE(status.toString().find("do not run the same step"), std::string::npos) << status.toString();
    EXPECT_NE(status.toString().find("runs step of rank 1"), std::string::npos) << status.toString();
  }
}

TEST(Executor, ARankWhoseMessagesShareAQueueIsToldApartFromOthers) {
  Model model(*lower(*makePlan("1F1B", {3, 3, 4, false})), 7);
  Ranks all(
      model, [&](int stage) { return model.spec(stage); },
      [](int rank, ExecutorConfig& config) {
        config.hasOneQueue = rank == 1;
        config.description = "step of rank " + std::to_string(rank);
      });
  for (const Status& status : all.step()) {
    EXPECT_NE(status.toString().find("runs step of rank 1, with one queue for its messages"), std::string::npos)
        << status.toString();
  }
}

TEST(Executor, CallsWhatIsAroundEachBackward) {
  for (const char* name : {"1F1B", "ZBV"}) {
    Model model(*lower(*makePlan(name, {1, name == std::string_view("ZBV") ? 2 : 1, 3, false})), 7);
    std::vector<std::string> events;
    bool raises = false;
    Ranks all(model, [&](int stage) {
      StageSpec spec = model.spec(stage);
      spec.aroundBackward = [&, stage](int microbatch, bool begins) {
        if (raises) throw std::runtime_error("not now");
        events.push_back(std::to_string(stage) + (begins ? " begins " : " ends ") + std::to_string(microbatch));
      };
      return spec;
    });
    all.stepOk();
    model.expectGradients();
    std::vector<std::string> expected;
    for (const Instruction& instruction : all.executors[0]->program().instructions) {
      if (instruction.op == InstructionOp::kForward || !isCompute(instruction.op)) continue;
      for (const char* what : {" begins ", " ends "}) {
        expected.push_back(std::to_string(instruction.stage) + what + std::to_string(instruction.microbatch));
      }
    }
    EXPECT_EQ(events, expected) << name;
    raises = true;
    EXPECT_NE(all.step()[0].toString().find("not now"), std::string::npos);
  }
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

// What happens in a step of ZB-H1 on one rank, with these hooks beside.
std::vector<std::string> eventsOfHalves(const std::function<void(StageSpec&, std::vector<std::string>&)>& addHooks) {
  Plan plan{1, 2, {0}, {{}}};
  for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackwardInput, ActionKind::kBackwardWeight}) {
    for (int i = 0; i < 2; ++i) plan.ranks[0].push_back({0, kind, i, {}});
  }
  std::vector<std::string> events;
  StageSpec spec;
  const at::Tensor weight = at::ones({1}).requires_grad_(true);
  weight.register_hook([&](const at::Tensor&) { events.push_back("backward"); });
  spec.forward = [&](int, const std::vector<at::Tensor>&, std::vector<at::Tensor>& outputs) {
    outputs.push_back(weight * 2);
  };
  addHooks(spec, events);
  ExecutorConfig config;
  config.stages.push_back(spec);
  auto executor = Executor::create(*lower(plan), 0, nullptr, std::move(config));
  EXPECT_TRUE(executor) << executor.status().toString();
  const Status status = executor.value()->step(false);
  EXPECT_TRUE(status.isOk()) << status.toString();
  return events;
}

TEST(Executor, FinishesAReductionAfterTheLastBackwardAlsoWhereThatIsNotSplit) {
  for (const bool isNeverSplit : {false, true}) {
    const auto events = eventsOfHalves([&](StageSpec& spec, std::vector<std::string>& events) {
      spec.requireGradSync = [&](bool required) { events.push_back(required ? "on" : "off"); };
      spec.finishGradSync = [&] { events.push_back("finish"); };
      spec.isNeverSplit = isNeverSplit;
    });
    EXPECT_EQ(events, (std::vector<std::string>{"off", "backward", "on", "backward", "finish"}));
  }
}

TEST(Executor, RunsWhatAStageHasPutOffInWOfItsMicrobatch) {
  const auto events = eventsOfHalves([](StageSpec& spec, std::vector<std::string>& events) {
    spec.buildWeightBackward = [&, built = 0]() mutable {
      events.push_back("build");
      return [&events, number = built++] { events.push_back("run " + std::to_string(number)); };
    };
  });
  EXPECT_EQ(events, (std::vector<std::string>{"backward", "build", "backward", "build", "run 0", "run 1"}));
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

TEST(Executor, AStepIsCapturedOnlyAfterOneThatLearnedNothing) {
  Model model(*lower(*makePlan("1F1B", {2, 2, 4, false})), 7);
  Ranks all(model);
  const auto expectTooEarly = [&] {
    for (const Status& status : all.step(/*relearn=*/false, /*isCaptured=*/true)) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(status.toString().find("expected two steps with the same shapes"), std::string::npos)
          << status.toString();
    }
  };
  expectTooEarly();
  all.stepOk();  // learns
  expectTooEarly();
  all.stepOk();  // learns again
  all.stepOk();
  for (int i = 0; i < 2; ++i) {
    for (const Status& status : all.step(false, true)) EXPECT_TRUE(status.isOk()) << status.toString();
  }
  all.stepOk(/*relearn=*/true);
  expectTooEarly();
}

TEST(Executor, AStepThatIsCapturedOnOneRankOnlyIsRefused) {
  Model model(*lower(*makePlan("1F1B", {2, 2, 4, false})), 7);
  Ranks all(model);
  for (int i = 0; i < 2; ++i) all.stepOk();
  std::thread other([&] { EXPECT_FALSE(all.executors[1]->step(false).isOk()); });
  const Status status = all.executors[0]->step(false, {}, /*isCaptured=*/true);
  other.join();
  EXPECT_NE(status.toString().find("captured in a graph"), std::string::npos) << status.toString();
  all.stepOk();
}

TEST(Executor, RefusesStagesThatThePlanDoesNotPlaceThere) {
  const Plan plan = *lower(*makePlan("GPipe", {1, 1, 2, false}));
  EXPECT_EQ(Executor::create(plan, 0, nullptr, {}).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace farandole::pipeline
