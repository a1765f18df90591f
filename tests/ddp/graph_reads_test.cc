#include "ddp/graph_reads.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <random>
#include <vector>

namespace farandole::ddp {
namespace {

std::uint64_t nextOperation() { return at::sequence_number::peek(); }

at::Tensor parameter() { return torch::ones({2, 2}, at::requires_grad()); }

TEST(GraphReads, TellsTheFirstThatWasReadBeforeItsTime) {
  const std::vector<at::Tensor> parameters = {parameter(), parameter(), parameter()};
  const GraphReads reads(parameters, {1, 0, 1});
  const std::uint64_t began = nextOperation();
  const at::Tensor first = parameters[0] * 2;
  const auto since = static_cast<std::int64_t>(nextOperation());
  const at::Tensor all = first + parameters[1] * parameters[2];
  const auto after = static_cast<std::int64_t>(nextOperation());
  EXPECT_EQ(reads.tooEarly({all}, began, {since, since}), 0);
  EXPECT_EQ(reads.tooEarly({all}, began, {since, static_cast<std::int64_t>(began)}), -1);
  EXPECT_EQ(reads.tooEarly({all}, began, {after, static_cast<std::int64_t>(began)}), 1);
  EXPECT_EQ(reads.tooEarly({all}, began, {-1, static_cast<std::int64_t>(began)}), 1);
  EXPECT_EQ(reads.tooEarly({all}, began, {-1, -1}), 0);
  EXPECT_EQ(reads.tooEarly({first}, began, {-1, static_cast<std::int64_t>(began)}), -1);
  EXPECT_EQ(reads.tooEarly({}, began, {-1, -1}), -1);
  EXPECT_EQ(reads.tooEarly({torch::ones(2)}, began, {-1, -1}), -1);
}

TEST(GraphReads, OfAnEarlierForwardOnlyViewsCount) {
  const std::vector<at::Tensor> parameters = {parameter(), parameter()};
  const GraphReads reads(parameters, {0, 1});
  const at::Tensor view = parameters[0].t().transpose(0, 1);
  const at::Tensor other = parameters[1] + parameters[0];
  const std::uint64_t began = nextOperation();
  EXPECT_EQ(reads.tooEarly({view * 2}, began, {-1, -1}), 0);
  EXPECT_EQ(reads.tooEarly({other * 2}, began, {-1, -1}), -1);
  EXPECT_EQ(reads.tooEarly({other}, began, {-1, -1}), -1);
}

// Against what is known of each operation: which parameters it reads, and which operations' results.
TEST(GraphReads, FindsInRandomGraphsWhatWasReadFirst) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 200; ++round) {
    constexpr int kParameters = 5;
    std::vector<at::Tensor> parameters;
    std::vector<int> groups;
    for (int p = 0; p < kParameters; ++p) {
      parameters.push_back(parameter());
      groups.push_back(pick(3));
    }
    const std::uint64_t began = nextOperation();
    std::vector<at::Tensor> results;
    std::vector<std::vector<std::int64_t>> firsts;  // by operation and parameter: which read it first
    for (int i = 1 + pick(20); i > 0; --i) {
      std::vector<std::int64_t> mine(kParameters, -1);
      const auto now = static_cast<std::int64_t>(nextOperation());
      const auto take = [&] {
        if (results.empty() || pick(2) == 0) {
          const int p = pick(kParameters);
          if (mine[p] < 0) mine[p] = now;
          return parameters[p];
        }
        const int r = pick(static_cast<int>(results.size()));
        for (int p = 0; p < kParameters; ++p) {
          if (firsts[r][p] >= 0 && (mine[p] < 0 || firsts[r][p] < mine[p])) mine[p] = firsts[r][p];
        }
        return results[r];
      };
      const at::Tensor a = take();
      const at::Tensor b = take();
      results.push_back(a * b);
      firsts.push_back(mine);
    }
    std::vector<std::int64_t> since;
    for (int g = 0; g < 3; ++g) {
      since.push_back(pick(4) == 0 ? -1
                                   : static_cast<std::int64_t>(began) + pick(static_cast<int>(results.size()) + 1));
    }
    int want = -1;
    for (int p = 0; p < kParameters; ++p) {
      const std::int64_t read = firsts.back()[p];
      const std::int64_t from = since[groups[p]];
      const bool isEarly = read >= 0 && (from < 0 || read < from);
      if (isEarly && (want < 0 || read < firsts.back()[want])) want = p;
    }
    const int got = GraphReads(parameters, groups).tooEarly({results.back()}, began, since);
    const bool isSame = got == want || (got >= 0 && want >= 0 && firsts.back()[got] == firsts.back()[want]);
    EXPECT_TRUE(isSame) << "seed " << seed << " round " << round << ": " << got << ", not " << want;
  }
}

TEST(GraphReads, RefusesGroupsThatAreNotThoseOfTheParameters) {
  EXPECT_THROW(GraphReads({parameter()}, {0, 1}), c10::ValueError);
}

}  // namespace
}  // namespace farandole::ddp
