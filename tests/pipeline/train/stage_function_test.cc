#include "pipeline/train/stage_function.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include "pipeline/train/loss.h"
#include "pipeline/train/module_stage.h"

namespace farandole::pipeline {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors numbers(int count) {
  Tensors tensors;
  for (int i = 0; i < count; ++i) tensors.push_back(at::full({2}, i + 1.0));
  return tensors;
}

// What `stage` makes of the vectors of 1, 2, ...: the first element of each.
std::vector<double> called(const ModuleStage& stage, int count) {
  Tensors outputs;
  stage.function(numbers(count), outputs);
  std::vector<double> values;
  for (const at::Tensor& output : outputs) values.push_back(output[0].item<double>());
  return values;
}

std::string errorOf(const ModuleStage& stage, int count) {
  try {
    called(stage, count);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

struct Difference : torch::nn::Module {
  // NOLINTNEXTLINE(performance-unnecessary-value-param): modules may take theirs by value
  at::Tensor forward(const at::Tensor& a, at::Tensor b) { return a - b; }
};

struct Total : torch::nn::Module {
  at::Tensor forward(at::TensorList tensors) { return at::stack(tensors).sum(0); }
};

struct Scaled : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& factor = std::nullopt) {
    return factor ? x * *factor : x;
  }
};

struct Nested : torch::nn::Module {
  std::tuple<at::Tensor, std::pair<at::Tensor, Tensors>> forward(const at::Tensor& x) const {
    return {x, {x + 1, {x + 2, x + 3}}};
  }
};

struct Elsewhere : torch::nn::Module {
  Elsewhere() { register_buffer("mean", at::empty({2}, at::device(at::kMeta))); }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

at::Tensor doubled(const at::Tensor& x) { return x * 2; }

TEST(ModuleStage, CallsModulesAndFunctionsWithTheirTensors) {
  using Values = std::vector<double>;
  EXPECT_EQ(called({0, std::make_shared<Difference>()}, 2), (Values{-1}));
  EXPECT_EQ(called({0, std::make_shared<Total>()}, 4), (Values{10}));
  EXPECT_EQ(called({0, std::make_shared<Scaled>()}, 1), (Values{1}));
  EXPECT_EQ(called({0, std::make_shared<Scaled>()}, 2), (Values{2}));
  EXPECT_EQ(called({0, std::make_shared<Nested>()}, 1), (Values{1, 2, 3, 4}));
  EXPECT_EQ(called({0, torch::nn::Identity()}, 1), (Values{1}));
  EXPECT_EQ(called({0, torch::nn::Sequential(torch::nn::Identity(), torch::nn::Tanhshrink())}, 1).size(), 1u);
  EXPECT_EQ(called({0, torch::nn::AnyModule(torch::nn::Identity())}, 1), (Values{1}));
  EXPECT_EQ(called({0, &doubled}, 1), (Values{2}));
  EXPECT_EQ(called({0, [](const Tensors& all) { return Tensors{all.back(), all.front()}; }}, 3), (Values{3, 1}));
  EXPECT_EQ(called({0, [](const at::Tensor& a, const at::Tensor& b) { return std::pair(b, a); }}, 2), (Values{2, 1}));
  EXPECT_EQ(called({0, [](const auto&... all) { return (all + ...); }}, 3), (Values{6}));
}

TEST(ModuleStage, SaysHowManyTensorsAModuleTakes) {
  EXPECT_EQ(errorOf({0, std::make_shared<Difference>()}, 3), "the module was called with 3 tensors, expected 2");
  EXPECT_EQ(errorOf({0, std::make_shared<Scaled>()}, 3), "the module was called with 3 tensors, expected 1 or 2");
}

TEST(ModuleStage, RefusesWhatCannotRun) {
  const auto refusal = [](const ModuleStage& stage) { return stage.check(at::kCPU).toString(); };
  EXPECT_NE(refusal({0, torch::nn::Linear(nullptr)}).find("its module is null, expected one"), std::string::npos);
  EXPECT_NE(refusal({0, std::shared_ptr<Total>()}).find("its module is null, expected one"), std::string::npos);
  EXPECT_NE(refusal({0, torch::nn::AnyModule()}).find("its module is null, expected one"), std::string::npos);
  const auto elsewhere = std::make_shared<Elsewhere>();
  const std::string text = "mean of its module is on meta, expected cpu, the schedule's device";
  EXPECT_NE(refusal({0, elsewhere}).find(text), std::string::npos);
  const ModuleStage function(
      0, [elsewhere](const at::Tensor& x) { return x; }, elsewhere);
  EXPECT_NE(refusal(function).find(text), std::string::npos);
  const ModuleStage here(0, torch::nn::Linear(2, 2));
  EXPECT_TRUE(here.check(at::kCPU).isOk());
  EXPECT_NE(here.check(at::Device(at::kCUDA, 1)).toString().find("weight of its module is on cpu, expected cuda:1"),
            std::string::npos);
}

TEST(Loss, TakesTheOutputOrAllOutputs) {
  const Tensors two = numbers(2);
  const Loss ofOne = [](const at::Tensor& output, const at::Tensor& target) { return (output - target).sum(); };
  EXPECT_EQ(ofOne({two[1]}, two[0]).item<double>(), 2);
  EXPECT_THROW(ofOne(two, two[0]), c10::ValueError);
  const Loss ofAll = [](const Tensors& outputs, const at::Tensor& target) { return outputs[1].dot(target); };
  EXPECT_EQ(ofAll(two, two[0]).item<double>(), 4);
  const Loss module = torch::nn::MSELoss();
  EXPECT_EQ(module({two[1]}, two[0]).item<double>(), 1);
  EXPECT_FALSE(Loss());
  EXPECT_FALSE(Loss(std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>()));
}

}  // namespace
}  // namespace farandole::pipeline
