// The order of buckets where experts have a group of their own, on what stands for a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ddp/bucket_issuer.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

DataParallelGroups groupsOf(const ThreadRank& dense, const ThreadRank& experts) {
  // What is summed up goes to the backend itself: c10d knows nothing on meta.
  dense.backend->gathersTensors = experts.backend->gathersTensors = true;
  return {{dense.group, nullptr}, {experts.group, nullptr}};
}

// Of four parameters with a bucket each, the last two of which are experts'.
class Rounds {
 public:
  Rounds(const ThreadRank& dense, const ThreadRank& experts, at::DeviceType device = at::kMeta)
      : dense_(dense),
        groups_(groupsOf(dense, experts)),
        buffers_(modelOn(device), groups_, {.bucketSize = 1}),
        issuer_(groups_, buffers_, {}),
        report_(groups_, {}, issuer_.ordersExperts()) {}

  // Gradients come in this order; those of the other parameters not before the end. The sizes of the dense buckets as
  // they were issued.
  std::vector<std::string> run(const std::vector<int>& parameters, bool showsOrder = true) {
    dense_.backend->events.clear();
    for (const int parameter : parameters) come(parameter);
    for (int parameter = 0; parameter < 4; ++parameter) {
      if (std::find(parameters.begin(), parameters.end(), parameter) == parameters.end()) come(parameter);
    }
    issuer_.await();
    std::vector<std::string> issued;
    for (const std::string& event : dense_.backend->events) {
      if (event == "allreduce 192" || event == "allreduce 64") issued.push_back(event);
    }
    report_.start("", 0, issuer_.departures(showsOrder), {});
    (void)report_.finish();
    issuer_.agreeOnOrder(report_);
    issuer_.reset();
    return issued;
  }

 private:
  static Model modelOn(at::DeviceType device) {
    std::vector<at::Tensor> tensors;
    for (const int64_t numel : {192, 64, 128, 32}) {
      tensors.push_back(at::zeros({numel}, at::device(device).dtype(at::kDouble)).set_requires_grad(true));
    }
    Model model = modelOf(tensors);
    model.parameters[2].isExpert = model.parameters[3].isExpert = true;
    return model;
  }
  void come(int parameter) {
    issuer_.markReady(parameter);
    issuer_.issue([this](int bucket) { return Parts{.tensors = {buffers_.gradsOf(bucket)}}; });
  }

  const ThreadRank& dense_;
  const DataParallelGroups groups_;
  const ModelBuffers buffers_;
  BucketIssuer issuer_;
  RoundReport report_;
};

TEST(ExpertOrder, RanksThatUseTheirExpertsAndRanksThatDoNotComeToAllBucketsInOneOrder) {
  runThreads(2, [](ThreadRank& dense, ThreadRank& experts) {
    dense.backend->waitsForRanks = experts.backend->waitsForRanks = true;
    Rounds rounds(dense, experts);
    for (int round = 0; round < 3; ++round) {
      rounds.run(dense.rank == 0 ? std::vector<int>{3, 2, 1, 0} : std::vector<int>{1, 0});
    }
    EXPECT_EQ(countOf(experts.backend->events, "allreduce 128"), 3U);
  });
}

void expectOrder(const ThreadRank& dense, const ThreadRank& experts, bool isLearned) {
  Rounds rounds(dense, experts);
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(rounds.run({0, 2, 3, 1}), isLearned && round > 0
                                            ? (std::vector<std::string>{"allreduce 192", "allreduce 64"})
                                            : (std::vector<std::string>{"allreduce 64", "allreduce 192"}));
  }
}

TEST(ExpertOrder, ThatOfBucketsOfSeveralGroupsStaysThatByIndex) {
  runThreads(2, [](ThreadRank& dense, ThreadRank& experts) { expectOrder(dense, experts, false); });
  runGrid(2, 2, [](int, ThreadRank& row, ThreadRank& column) { expectOrder(row, column, false); });
}

TEST(ExpertOrder, ThatOfTheFirstRoundIsTakenOverWhereAllHaveOneGroup) {
  runThreads(2, [](ThreadRank& self) { expectOrder(self, self, true); });
}

// On the CPU, where each kind has a queue, and other ranks agree on it.
TEST(ExpertOrder, EachKindLearnsItsOwnWhenOneOfItsRanksShowsOne) {
  runGrid(2, 2, [](int rank, ThreadRank& row, ThreadRank& column) {
    Rounds rounds(row, column, at::kCPU);
    const std::vector<std::string> byIndex = {"allreduce 64", "allreduce 192"};
    const std::vector<std::string> asSeen = {"allreduce 192", "allreduce 64"};
    // Rounds of the first row show nothing at first.
    for (int round = 0; round < 4; ++round) {
      const bool isLearned = rank < 2 ? round > 2 : round > 0;
      column.backend->events.clear();
      EXPECT_EQ(rounds.run({0, 2, 3, 1}, rank >= 2 || round >= 2), isLearned ? asSeen : byIndex)
          << rank << " " << round;
      // In each column one rank's do: experts' buckets are in the order of its arrivals from the second round on.
      std::vector<std::string> experts;
      for (const std::string& event : column.backend->events) {
        if (event == "allreduce 128" || event == "allreduce 32") experts.push_back(event);
      }
      const bool areLearned = round > 0;
      EXPECT_EQ(experts, (areLearned ? std::vector<std::string>{"allreduce 128", "allreduce 32"}
                                     : std::vector<std::string>{"allreduce 32", "allreduce 128"}))
          << rank << " " << round;
    }
  });
}

}  // namespace
}  // namespace farandole::ddp
