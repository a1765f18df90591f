#include "ddp/model_agreement.h"

#include <gtest/gtest.h>

#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

// The error of each rank; empty where there was none.
std::vector<std::string> errorsOf(const std::vector<std::vector<Fact>>& factsByRank,
                                  const std::vector<std::string>& refusals = {}) {
  std::vector<std::string> errors(factsByRank.size());
  runThreads(static_cast<int>(factsByRank.size()), [&](ThreadRank& self) {
    try {
      checkAgreement(*self.group, at::kCPU, factsByRank[self.rank], refusals.empty() ? "" : refusals[self.rank]);
    } catch (const c10::ValueError& error) {
      errors[self.rank] = error.what_without_backtrace();
    }
  });
  return errors;
}

void expectOnAll(const std::vector<std::string>& errors, const std::string& text) {
  for (const std::string& error : errors) EXPECT_NE(error.find(text), std::string::npos) << error;
}

TEST(ModelAgreement, EqualModelsPass) {
  const std::vector<Fact> facts = {{"parameter 'a'", "[2]"}, {"buffer 'b'", "[]"}};
  for (const std::string& error : errorsOf({facts, facts, facts})) EXPECT_EQ(error, "");
  for (const std::string& error : errorsOf({{}, {}})) EXPECT_EQ(error, "");
}

TEST(ModelAgreement, TheFirstDifferenceOfAnyRankIsNamedOnEveryRank) {
  const std::vector<Fact> facts = {{"p 'a'", "[2]"}, {"p 'b'", "[3]"}, {"p 'c'", "[4]"}};
  auto late = facts, early = facts;
  late[2].value = "[5]";
  early[1].value = "[7]";
  expectOnAll(errorsOf({facts, late, early}), "first difference: rank 0 has p 'b': [3]; rank 2 has p 'b': [7]");
}

TEST(ModelAgreement, ARankWithFewerOrMoreOrOtherNamesIsNamed) {
  const std::vector<Fact> facts = {{"p 'a'", "[2]"}, {"p 'b'", "[3]"}};
  const std::vector<Fact> shorter = {facts[0]};
  expectOnAll(errorsOf({facts, facts, shorter}), "rank 0 has p 'b': [3]; rank 2 has nothing more");
  expectOnAll(errorsOf({shorter, facts}), "rank 0 has nothing more; rank 1 has p 'b': [3]");
  const std::vector<Fact> renamed = {facts[0], {"p 'c'", "[3]"}};
  expectOnAll(errorsOf({facts, renamed}), "rank 0 has p 'b': [3]; rank 1 has p 'c': [3]");
  expectOnAll(errorsOf({{}, facts}), "rank 0 has nothing more; rank 1 has p 'a': [2]");
}

TEST(ModelAgreement, ARefusalOfOneRankIsRaisedOnAll) {
  const std::vector<Fact> facts = {{"p 'a'", "[2]"}};
  expectOnAll(errorsOf({facts, facts, {}}, {"", "", "no parameters"}), "rank 2: no parameters");
  expectOnAll(errorsOf({{}, {}}, {"no parameters", "no parameters"}), "rank 0: no parameters");
}

TEST(ModelAgreement, FactsTellNameShapeTypeAndWhetherAParameterIsTrained) {
  Model model;
  model.parameters.push_back({"w", at::zeros({4, 3}, at::kBFloat16).set_requires_grad(true)});
  model.parameters.push_back({"frozen", at::zeros({2})});
  model.buffers.push_back({"steps", at::zeros({}, at::kLong)});
  const std::vector<Fact> facts = factsOf(model);
  ASSERT_EQ(facts.size(), 3U);
  EXPECT_EQ(facts[0].name + ": " + facts[0].value, "parameter 'w': [4, 3] BFloat16 on cpu, trainable");
  EXPECT_EQ(facts[1].name + ": " + facts[1].value, "parameter 'frozen': [2] Float on cpu, frozen");
  EXPECT_EQ(facts[2].name + ": " + facts[2].value, "buffer 'steps': [] Long on cpu");
}

TEST(ModelAgreement, BroadcastGivesAllRanksTheModelOfRankZero) {
  runThreads(3, [](ThreadRank& self) {
    const double value = self.rank + 1;
    Model model;
    model.parameters.push_back({"a", at::full({3, 3}, value).set_requires_grad(true)});
    model.parameters.push_back({"b", at::full({5}, value, at::kDouble)});
    model.parameters.push_back({"z", at::full({2}, value, at::kComplexFloat)});
    model.buffers.push_back({"n", at::full({}, value, at::kLong)});
    model.buffers.push_back({"none", at::zeros({0})});
    broadcastModel(self.group, model);
    for (const auto& parameter : model.parameters) EXPECT_TRUE(parameter.tensor.eq(1).all().item<bool>());
    for (const auto& [name, tensor] : model.buffers) EXPECT_TRUE(tensor.eq(1).all().item<bool>()) << name;
  });
}

TEST(ModelAgreement, ExpertsAreBroadcastAmongThoseThatHoldTheSame) {
  runGrid(2, 2, [](int rank, ThreadRank& row, ThreadRank& column) {
    Model model;
    model.parameters.push_back({"dense", at::full({3}, rank + 1.0)});
    model.parameters.push_back({"expert", at::full({3}, rank + 1.0), /*isExpert=*/true});
    broadcastModel({{row.group, column.group}, {column.group, nullptr}}, model);
    EXPECT_TRUE(model.parameters[0].tensor.eq(1).all().item<bool>());
    EXPECT_TRUE(model.parameters[1].tensor.eq(row.rank + 1).all().item<bool>());
  });
}

}  // namespace
}  // namespace farandole::ddp
