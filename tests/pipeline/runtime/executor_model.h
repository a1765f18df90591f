#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "pipeline/ir/stage_graph.h"
#include "pipeline/passes/lower.h"
#include "pipeline/runtime/executor.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/runtime/thread_backend.h"

namespace farandole::pipeline {

inline constexpr std::int64_t kWidth = 3;

// A pipeline of stages with y = tanh(x @ w), x the sum of what the stages before it hand over, and its oracle.
struct Model {
  Model(Plan plan, std::uint64_t seed) : plan(std::move(plan)) {
    at::manual_seed(seed);
    for (int stage = 0; stage < this->plan.numStages; ++stage) {
      weights.push_back(at::randn({kWidth, kWidth}, at::kDouble).requires_grad_(true));
    }
    for (int i = 0; i < this->plan.numMicrobatches; ++i) {
      // Sizes differ by microbatch, as those of an uneven split.
      inputs.push_back(at::randn({1 + i % 2, kWidth}, at::kDouble));
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
      if (isLast(stage) && !isFirst(stage)) {
        const std::lock_guard lock(addressesMutex);  // a graph may have several last stages
        addresses.insert(tensors.at(0).data_ptr());
      }
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
        const double scale = lossScales.empty() ? 1 : lossScales[microbatch];
        if (isLast(stage)) outputs[stage][0].backward(at::full({}, scale, at::kDouble), /*retain_graph=*/true);
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
      EXPECT_TRUE(at::allclose(weights[stage].grad(), grads[stage], 1e-9, 1e-12)) << "stage " << stage;
    }
  }

  using Selection = std::pair<StageEdge, std::vector<std::int32_t>>;

  Plan plan;
  std::vector<StageEdge> edges;  // of the plan
  std::vector<at::Tensor> weights, inputs;
  std::vector<double> lossScales;   // by microbatch; none for 1
  bool hasTwoOutputs = false;       // but for last stages
  std::vector<Selection> selected;  // for some edges
  std::mutex addressesMutex;
  std::set<const void*> addresses;  // of the last stage's inputs
  int failStage = -1, failMicrobatch = -1;
  int failOutput = -1;  // the stage whose outputs get the hook
  std::function<at::Tensor(const at::Tensor&)> outputHook;
};

class Ranks {
 public:
  explicit Ranks(Model& model) : Ranks(model, [&model](int stage) { return model.spec(stage); }) {}

  // `adjust` may change what each rank is made with.
  Ranks(const Model& model, const std::function<StageSpec(int)>& spec,
        const std::function<void(int rank, ExecutorConfig&)>& adjust = {})
      : abandoned(model.plan.numRanks()), model_(model), world_(std::make_shared<ThreadWorld>(model.plan.numRanks())) {
    for (int rank = 0; rank < world_->size; ++rank) {
      ExecutorConfig config;
      for (int stage = 0; stage < model.plan.numStages; ++stage) {
        if (model.plan.rankOfStage[stage] == rank) config.stages.push_back(spec(stage));
      }
      for (StageSpec& one : config.stages) {
        one.abandonGradSync = [this, rank](const std::string& reason) { abandoned[rank].push_back(reason); };
      }
      if (adjust) adjust(rank, config);
      backends.push_back(c10::make_intrusive<ThreadBackend>(world_, rank));
      Result<std::unique_ptr<Executor>> executor =
          Executor::create(model.plan, rank, backends.back(), std::move(config));
      if (!executor) throw std::runtime_error(executor.status().toString());
      executors.push_back(std::move(executor).value());
    }
  }

  std::vector<Status> step(bool relearn = false, bool isCaptured = false) {
    std::vector<Status> statuses(executors.size());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < executors.size(); ++rank) {
      threads.emplace_back(
          [&, rank] { statuses[rank] = executors[rank]->step(relearn, model_.lossScales, isCaptured); });
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
  const Model& model_;
  std::shared_ptr<ThreadWorld> world_;
};

// Any schedule with counts that it can run.
inline Plan randomPlan(std::string_view name, std::mt19937_64& rng) {
  while (true) {
    const int ranks = 1 + static_cast<int>(rng() % 4);
    const int stages = ranks * (1 + static_cast<int>(rng() % 3));
    const int microbatches = 1 + static_cast<int>(rng() % 12);
    Result<Plan> plan = makePlan(name, {ranks, stages, microbatches, false});
    if (plan) return *lower(*plan, ChannelModel::kTagged);
  }
}

}  // namespace farandole::pipeline
