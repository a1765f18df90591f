#include <gtest/gtest.h>

#include <limits>

#include "pipeline/schedules/registry.h"
#include "tests/pipeline/train/training.h"

namespace farandole::pipeline {
namespace {

// 1F1B over three ranks: an error is one of all ranks, and the next step runs.
class ScheduleErrors : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3, kMicrobatches = 4;

  ScheduleErrors()
      : plan_(*makePlan("1F1B", {kRanks, kRanks, kMicrobatches})),
        layers_(makeLayers(kRanks, 7)),
        reference_(plan_, makeLayers(kRanks, 7)),
        good_(example(10)) {
    config_.numMicrobatches = kMicrobatches;
  }

  Ranks make(const std::function<void(int rank, ScheduleConfig&)>& adjust = nullptr) {
    return {config_, plan_, layers_, adjust};
  }

  Batch goodBatch() const { return {.inputs = {good_.x}, .target = good_.y}; }

  void expectNextStepRuns(Ranks& all) {
    for (Layer layer : layers_) layer->zero_grad();
    for (Layer layer : reference_.layers()) layer->zero_grad();
    expectResults(all.step(goodBatch()), plan_, reference_.step(good_), false);
    expectGradients(layers_, reference_.layers());
  }

  // Before the shapes are known, and after.
  void expectRefused(const Batch& batch, const std::string& text) {
    SCOPED_TRACE(text);
    Ranks all = make();
    for (int time = 0; time < 2; ++time) {
      expectErrors(all.step(batch), text);
      expectNextStepRuns(all);
    }
  }

  Plan plan_;
  Layers layers_;
  OneProcess reference_;
  Example good_;
  ScheduleConfig config_;
};

TEST_F(ScheduleErrors, OfALossThatIsNaNReachEveryRankWhereThatIsAskedFor) {
  Batch batch = goodBatch();
  batch.target = batch.target.clone();
  batch.target[-1].fill_(std::numeric_limits<double>::quiet_NaN());
  Ranks all = make([](int, ScheduleConfig& config) { config.checkForNan = true; });
  for (int time = 0; time < 2; ++time) {
    expectErrors(all.step(batch),
                 "rank 2, stage 2, microbatch 3: the loss is NaN or infinite, expected a finite number");
    expectNextStepRuns(all);
  }
}

TEST_F(ScheduleErrors, OfABatchReachEveryRank) {
  const auto changed = [this](const std::function<void(Batch&)>& change) {
    Batch batch = goodBatch();
    change(batch);
    return batch;
  };
  expectRefused(changed([](Batch& b) { b.inputs = {b.inputs[0].narrow(0, 0, 3)}; }),
                "rank 0: inputs[0] has 3 rows along dimension 0, expected at least numMicrobatches = 4");
  expectRefused(changed([](Batch& b) { b.inputs.push_back(at::ones({})); }),
                "rank 0: inputs[1] has no dimension to split along");
  expectRefused(changed([](Batch& b) { b.inputs.clear(); }), "rank 0: inputs is empty, expected the arguments");
  expectRefused(changed([](Batch& b) { b.inputs = {at::Tensor()}; }), "rank 0: inputs[0] is undefined");
  expectRefused(changed([](Batch& b) { b.inputs = {b.inputs[0].to(at::kMeta)}; }),
                "rank 0: inputs[0] is on meta, expected cpu");
  expectRefused(changed([](Batch& b) { b.target.reset(); }),
                "rank 2: target is undefined, expected what the loss takes");
  expectRefused(changed([](Batch& b) { b.target = b.target.narrow(0, 0, 2); }),
                "rank 2: target has 2 rows along dimension 0, expected at least numMicrobatches = 4");
  expectRefused(changed([](Batch& b) { b.targetMicrobatches = {b.target}; }),
                "rank 2: target and targetMicrobatches were given, expected one of them");
  // These fit, as far as the pipeline can see; the modules and the loss do not take them.
  expectRefused(changed([](Batch& b) { b.target = b.target.narrow(0, 0, 9); }),
                "rank 2, stage 2, microbatch 1: forward:");
  expectRefused(changed([](Batch& b) { b.inputs = {b.inputs[0].narrow(1, 0, 2)}; }), "rank 0, stage 0, microbatch 0: ");
}

TEST_F(ScheduleErrors, OfADeviceReachEveryRank) {
  const Plan plan = *makePlan("GPipe", {2, 2, 2});
  ScheduleConfig config;
  config.name = "GPipe";
  config.numMicrobatches = 2;
  const auto refused = [&](at::Device device, const std::string& text) {
    Ranks all(config, plan, makeLayers(2, 7), [device](int, ScheduleConfig& own) { own.device = device; });
    expectErrors(all.step(goodBatch()), text);
  };
  refused(at::kMeta, "device is meta, expected cpu or cuda");
  refused(at::Device(at::kCUDA, 0), "deviceBackend is null, expected one that sends tensors on cuda:0");
  Ranks alone({.name = "GPipe", .numMicrobatches = 2}, *makePlan("GPipe", {1, 1, 2}), makeLayers(1, 7),
              [](int, ScheduleConfig& own) { own.device = at::Device(at::kCUDA, 99); });
  expectErrors(alone.step(goodBatch()), "device is cuda:99, expected one of the ");
}

TEST_F(ScheduleErrors, OfSeveralRanksAreAllTold) {
  Ranks all = make();
  const auto results = all.step({});
  expectErrors(results, "rank 0: inputs is empty");
  expectErrors(results, "rank 2: target is undefined");
  expectNextStepRuns(all);
}

TEST_F(ScheduleErrors, OfAModuleReachEveryRank) {
  Ranks all = make();
  for (int stage = 0; stage < kRanks; ++stage) {
    int calls = 0;
    layers_[stage]->before = [&calls] {
      if (++calls == 3) throw std::runtime_error("it broke");
    };
    expectErrors(all.step(goodBatch()), "stage " + std::to_string(stage) + ", microbatch 2: forward: it broke");
    layers_[stage]->before = nullptr;
    expectNextStepRuns(all);
  }
}

TEST_F(ScheduleErrors, OfALossReachEveryRank) {
  int bad = 0;
  Ranks all = make([&bad](int, ScheduleConfig& own) {
    own.loss = [&bad](const at::Tensor& output, const at::Tensor& target) {
      if (bad == 1) return (output - target).square();
      if (bad == 2) return at::Tensor();
      if (bad == 3) return squares(output, target).detach();
      return squares(output, target);
    };
  });
  for (const char* text : {"the loss is a tensor of shape [3, 3], expected a tensor of one element",
                           "the loss is undefined, expected a tensor of one element",
                           "expected a tensor of one element that requires grad"}) {
    ++bad;
    expectErrors(all.step(goodBatch()), text);
    if (bad == 3) {
      expectOk(all.eval(goodBatch()));
    } else {
      expectErrors(all.eval(goodBatch()), text);
    }
    const int now = std::exchange(bad, 0);
    expectNextStepRuns(all);
    bad = now;
  }
}

TEST_F(ScheduleErrors, OfAConfigurationReachEveryRankAndTheGroupCanBeUsedAgain) {
  const auto refused = [this](const std::string& text, const std::function<void(int, ScheduleConfig&)>& adjust) {
    SCOPED_TRACE(text);
    std::vector<c10::intrusive_ptr<c10d::Backend>> backends(kRanks);
    Ranks bad = make([&](int rank, ScheduleConfig& own) {
      backends[rank] = own.backend;
      adjust(rank, own);
    });
    for (int time = 0; time < 2; ++time) expectErrors(bad.step(goodBatch()), text);
    Ranks good = make([&backends](int rank, ScheduleConfig& own) { own.backend = backends[rank]; });
    expectNextStepRuns(good);
  };
  const auto onRankOne = [](const std::function<void(ScheduleConfig&)>& change) {
    return [change](int rank, ScheduleConfig& own) {
      if (rank == 1) change(own);
    };
  };
  refused("rank 1: stages is 2 (by index), expected 1, which the plan runs on rank 1",
          onRankOne([](ScheduleConfig& own) { own.stages[0].index = 2; }));
  refused("rank 1: stages is none (by index), expected 1", onRankOne([](ScheduleConfig& own) { own.stages.clear(); }));
  refused("rank 1: stage 1: its module is null, expected one",
          onRankOne([](ScheduleConfig& own) { own.stages[0] = ModuleStage(1, Layer(nullptr)); }));
  refused("rank 1: stage 1: outputsTo names stage 0, expected one that an edge of the plan leads to",
          onRankOne([](ScheduleConfig& own) {
            own.stages[0].outputsTo = {{0, {0}}};
          }));
  refused("rank 1: schedule 1F1B: numMicrobatches is 0",
          onRankOne([](ScheduleConfig& own) { own.numMicrobatches = 0; }));
  refused("the ranks do not run the same step: ", onRankOne([](ScheduleConfig& own) { own.numMicrobatches = 5; }));
  refused("schedule name is '1F2B'; expected one of none, GPipe", [](int, ScheduleConfig& own) { own.name = "1F2B"; });
  refused("the plan has 2 ranks, expected 3 as the backend has", [](int, ScheduleConfig& own) {
    own.plan = *makePlan("1F1B", {2, 2, 4});
  });
  refused("the plan has no backwards, expected some for step(): or call eval()", [](int, ScheduleConfig& own) {
    own.plan = *makePlan("1F1B", {kRanks, kRanks, kMicrobatches, true});
  });
}

TEST_F(ScheduleErrors, OfGradientsThatAreDisabledAndOfStepsWithinAStep) {
  Ranks all = make();
  const auto results = all.each([this](int rank, Schedule& schedule) {
    const at::AutoGradMode mode(rank != 1);
    return schedule.step(goodBatch());
  });
  expectErrors(results, "rank 1: gradients are disabled (NoGradGuard), expected enabled ones: or call eval()");
  expectNextStepRuns(all);

  Status nested;
  expectOk(all.each([&](int rank, Schedule& schedule) {
    if (rank == 1) {
      layers_[1]->before = [&] { nested = schedule.eval(goodBatch()).status(); };
    }
    return schedule.step(goodBatch());
  }));
  EXPECT_NE(nested.toString().find("from within a step of the same schedule"), std::string::npos) << nested.toString();
}

}  // namespace
}  // namespace farandole::pipeline
