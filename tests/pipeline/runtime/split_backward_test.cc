#include "pipeline/runtime/split_backward.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <functional>
#include <map>
#include <random>

#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::edge_list;
using torch::autograd::tensor_list;
using torch::autograd::variable_list;

constexpr std::int64_t kWidth = 4;

// x * w, by a function of the user's that counts its backwards.
struct CountedProduct : torch::autograd::Function<CountedProduct> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static tensor_list backward(AutogradContext* context, const tensor_list& grads) {
    ++backwards;
    const tensor_list saved = context->get_saved_variables();
    return {grads[0] * saved[1], grads[0] * saved[0]};
  }
  static inline int backwards = 0;
};

std::vector<at::Tensor> leafClones(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> clones;
  for (const at::Tensor& leaf : leaves) clones.push_back(leaf.detach().clone().set_requires_grad(leaf.requires_grad()));
  return clones;
}

edge_list edgesOf(const std::vector<at::Tensor>& inputs) {
  edge_list edges;
  for (const at::Tensor& input : inputs) {
    edges.push_back(input.requires_grad() ? torch::autograd::impl::gradient_edge(input) : torch::autograd::Edge());
  }
  return edges;
}

// A stage made of random operations, the same for the same seed: some outputs depend on inputs, some on weights only,
// weights are used several times, and one operation may have several results.
struct RandomStage {
  explicit RandomStage(std::uint64_t seed) : seed(seed) {
    std::mt19937_64 rng(seed);
    at::manual_seed(rng());
    for (std::size_t i = 0, count = rng() % 3; i < count; ++i) {
      inputs.push_back(at::randn({kWidth, kWidth}, at::kDouble).set_requires_grad(rng() % 4 != 0));
    }
    for (std::size_t i = 0, count = 1 + rng() % 4; i < count; ++i) {
      weights.push_back(at::randn({kWidth, kWidth}, at::kDouble).set_requires_grad(rng() % 6 != 0));
    }
    numOps = 1 + static_cast<int>(rng() % 20);
    usesFunctions = rng() % 2 == 0;
    opSeed = rng();
  }

  std::vector<at::Tensor> outputs(const std::vector<at::Tensor>& xs, const std::vector<at::Tensor>& ws) const {
    std::mt19937_64 rng(opSeed);
    std::vector<at::Tensor> pool(xs);
    pool.insert(pool.end(), ws.begin(), ws.end());
    const auto any = [&] { return pool[rng() % pool.size()]; };
    const auto weight = [&] { return ws[rng() % ws.size()]; };
    for (int i = 0; i < numOps; ++i) {
      switch (rng() % (usesFunctions ? 11 : 8)) {
        case 0: pool.push_back(at::tanh(any())); break;
        case 1: pool.push_back(at::matmul(any(), weight()) * 0.5); break;
        case 2: pool.push_back(at::addmm(any(), any(), weight()) * 0.3); break;
        case 3: pool.push_back(any() + any()); break;
        case 4: pool.push_back(at::layer_norm(any(), {kWidth}, weight()[0], weight()[1])); break;
        case 5: {
          const auto halves = any().chunk(2);
          pool.push_back(at::cat({halves[rng() % 2], halves[0] * 2}));
          break;
        }
        case 6: pool.push_back(any() * weight()); break;
        case 7: pool.push_back(at::sin(any()).detach()); break;
        default: {
          const at::Tensor x = any();
          pool.push_back(CountedProduct::apply(x, weight()));
          break;
        }
      }
    }
    std::vector<at::Tensor> results;
    for (std::size_t i = 0, count = 1 + rng() % 3; i < count; ++i)
      results.push_back(pool[pool.size() - 1 - rng() % std::min<std::size_t>(3, pool.size())]);
    return results;
  }

  std::uint64_t seed, opSeed;
  int numOps;
  bool usesFunctions;
  std::vector<at::Tensor> inputs, weights;
};

struct Backward {
  edge_list roots;
  variable_list grads;
};

Backward backwardOf(const std::vector<at::Tensor>& outputs) {
  Backward backward;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    backward.roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
    backward.grads.push_back(at::full_like(outputs[i].detach(), 1.0 + static_cast<double>(i)));
  }
  return backward;
}

void expectSameGrads(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected, const char* what) {
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].grad().defined(), expected[i].grad().defined()) << what << " " << i;
    if (actual[i].grad().defined()) {
      EXPECT_TRUE(at::allclose(actual[i].grad(), expected[i].grad(), 1e-9, 1e-9, true)) << what << " " << i;
    }
  }
}

TEST(SplitBackward, BothHalvesTogetherAreTheWholeBackwardOfAnyGraph) {
  const std::uint64_t seed = testing::someSeed();
  SplitBackward split;
  int numDeferred = 0, numEarly = 0, numUnreached = 0;
  for (std::uint64_t round = 0; round < 500; ++round) {
    SCOPED_TRACE("seed " + std::to_string(seed + round));
    const RandomStage stage(seed + round);
    const auto expectedInputs = leafClones(stage.inputs), expectedWeights = leafClones(stage.weights);
    Backward whole = backwardOf(stage.outputs(expectedInputs, expectedWeights));
    if (whole.roots.empty()) continue;
    CountedProduct::backwards = 0;
    torch::autograd::Engine::get_default_engine().execute(whole.roots, whole.grads, false, false, true);
    const int backwards = CountedProduct::backwards;

    const auto inputs = leafClones(stage.inputs), weights = leafClones(stage.weights);
    Backward backward = backwardOf(stage.outputs(inputs, weights));
    CountedProduct::backwards = 0;
    DeferredBackward deferred;
    split.analyze(backward.roots, edgesOf(inputs), {});
    const bool isSplittable = split.unsplittable() == nullptr;
    split.runInput(backward.roots, backward.grads, deferred);
    expectSameGrads(inputs, expectedInputs, "input");
    if (isSplittable) {
      for (const at::Tensor& weight : weights) EXPECT_FALSE(weight.grad().defined());
    }
    numDeferred += !deferred.roots.empty();
    numEarly += !isSplittable;
    SplitBackward::runWeight(deferred);
    numUnreached += std::ranges::none_of(inputs, [](const at::Tensor& x) { return x.grad().defined(); });
    expectSameGrads(inputs, expectedInputs, "input after W");
    expectSameGrads(weights, expectedWeights, "weight");
    EXPECT_EQ(CountedProduct::backwards, backwards);
    EXPECT_TRUE(deferred.roots.empty());
  }
  // Each kind of case was among them.
  EXPECT_GT(numDeferred, 50);
  EXPECT_GT(numEarly, 2);
  EXPECT_GT(numUnreached, 10);
}

struct Chain {
  Chain() {
    for (int i = 0; i < 3; ++i) weights.push_back(at::randn({kWidth, kWidth}).requires_grad_(true));
    input = at::randn({kWidth, kWidth}).requires_grad_(true);
  }
  Backward run(const std::function<void(at::Tensor&)>& see = [](at::Tensor&) {}) {
    at::Tensor x = input;
    for (const at::Tensor& weight : weights) {
      at::Tensor y = at::matmul(x, weight);
      x = at::tanh(y);
      see(x);
      products.push_back(c10::weak_intrusive_ptr<c10::TensorImpl>(y.getIntrusivePtr()));
      tanhs.push_back(c10::weak_intrusive_ptr<c10::StorageImpl>(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(x.storage().unsafeGetStorageImpl())));
    }
    return backwardOf({x.sum()});
  }
  at::Tensor input;
  std::vector<at::Tensor> weights;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> products;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> tanhs;
};

TEST(SplitBackward, AfterTheInputsHalfOnlyWhatTheWeightsNeedIsLeft) {
  Chain chain;
  Backward backward = chain.run();
  SplitBackward split;
  DeferredBackward deferred;
  split.analyze(backward.roots, edgesOf({chain.input}), {});
  EXPECT_EQ(split.unsplittable(), nullptr);
  split.runInput(backward.roots, backward.grads, deferred);
  // The products' nodes keep their first factors, the results of tanh before them; nobody needs the last result.
  ASSERT_EQ(deferred.roots.size(), 3u);
  EXPECT_FALSE(chain.tanhs[0].expired());
  EXPECT_FALSE(chain.tanhs[1].expired());
  EXPECT_TRUE(chain.tanhs[2].expired());
  SplitBackward::runWeight(deferred);
  for (const auto& storage : chain.tanhs) EXPECT_TRUE(storage.expired());
  for (const at::Tensor& weight : chain.weights) EXPECT_TRUE(weight.grad().defined());
}

TEST(SplitBackward, HooksOfTheUsersRunOnce) {
  Chain chain;
  int onActivation = 0, onWeight = 0, onNode = 0;
  chain.weights[1].register_hook([&](const at::Tensor&) { ++onWeight; });
  Backward backward = chain.run([&](at::Tensor& x) {
    x.register_hook([&](const at::Tensor&) { ++onActivation; });
    x.retain_grad();
  });
  backward.roots[0].function->next_edge(0).function->add_post_hook(
      std::make_unique<torch::autograd::utils::LambdaPostHook>([&](const variable_list& outputs, const variable_list&) {
        ++onNode;
        return outputs;
      }));
  SplitBackward split;
  DeferredBackward deferred;
  split.analyze(backward.roots, edgesOf({chain.input}), {});
  split.runInput(backward.roots, backward.grads, deferred);
  EXPECT_EQ(onWeight, 0);
  SplitBackward::runWeight(deferred);
  EXPECT_EQ(onActivation, 3);
  EXPECT_EQ(onWeight, 1);
  EXPECT_EQ(onNode, 1);
}

TEST(SplitBackward, AHookOfAProductsResultKeepsItsWeightInTheFirstHalf) {
  Chain chain;
  const at::Tensor y = at::matmul(chain.input, chain.weights[0]);
  int calls = 0;
  y.register_hook([&](const at::Tensor& grad) {
    ++calls;
    return grad * 2;
  });
  Backward backward = backwardOf({at::matmul(y, chain.weights[1]).sum()});
  SplitBackward split;
  DeferredBackward deferred;
  split.analyze(backward.roots, edgesOf({chain.input}), {});
  ASSERT_NE(split.unsplittable(), nullptr);
  EXPECT_EQ(split.unsplittable()->name(), "MmBackward0");
  split.runInput(backward.roots, backward.grads, deferred);
  EXPECT_TRUE(chain.weights[0].grad().defined());
  EXPECT_FALSE(chain.weights[1].grad().defined());
  SplitBackward::runWeight(deferred);
  EXPECT_EQ(calls, 1);
  const at::Tensor ones = at::ones({kWidth, kWidth});
  const at::Tensor expected = at::matmul(chain.input.detach().t(), 2 * at::matmul(ones, chain.weights[1].detach().t()));
  EXPECT_TRUE(at::allclose(chain.weights[0].grad(), expected, 1e-4, 1e-5));
}

TEST(SplitBackward, AnErrorLeavesNoHooksBehind) {
  Chain chain;
  Backward backward = chain.run([](at::Tensor& x) {
    x.register_hook([](const at::Tensor& grad) -> at::Tensor {
      if (grad.defined()) throw std::runtime_error("no gradient today");
      return grad;
    });
  });
  const edge_list roots = backward.roots;
  SplitBackward split;
  DeferredBackward deferred;
  split.analyze(backward.roots, edgesOf({chain.input}), {});
  EXPECT_THROW(split.runInput(backward.roots, backward.grads, deferred), std::runtime_error);
  std::vector<Node*> nodes{roots[0].function.get()};
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    EXPECT_TRUE(nodes[i]->pre_hooks().empty()) << nodes[i]->name();
    for (const auto& edge : nodes[i]->next_edges()) {
      if (edge.is_valid()) nodes.push_back(edge.function.get());
    }
  }
}

}  // namespace
}  // namespace farandole::pipeline
