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

// Of three parameters with a bucket each, the last of which is an expert's.
class Rounds {
 public:
  Rounds(const ThreadRank& dense, const ThreadRank& experts)
      : dense_(dense),
        groups_(groupsOf(dense, experts)),
        buffers_(model(), groups_, {.bucketSize = 1}),
        issuer_(groups_, buffers_, {}),
        report_(groups_, {}) {}

  // Gradients come in this order; those of the other parameters not before the end. The sizes of the dense buckets as
  // they were issued.
  std::vector<std::string> run(const std::vector<int>& parameters) {
    dense_.backend->events.clear();
    for (const int parameter : parameters) come(parameter);
    for (int parameter = 0; parameter < 3; ++parameter) {
      if (std::find(parameters.begin(), parameters.end(), parameter) == parameters.end()) come(parameter);
    }
    issuer_.await();
    const std::vector<std::string> issued(dense_.backend->events.begin(), dense_.backend->events.begin() + 2);
    if (!isLearned_) isLearned_ = issuer_.learnOrder(report_, true);
    issuer_.reset();
    return issued;
  }

 private:
  static Model model() {
    std::vector<at::Tensor> tensors;
    for (const int64_t numel : {192, 64, 128}) {
      tensors.push_back(at::empty({numel}, at::device(at::kMeta).dtype(at::kDouble)).set_requires_grad(true));
    }
    Model model = modelOf(tensors);
    model.parameters.back().isExpert = true;
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
  const RoundReport report_;
  bool isLearned_ = false;
};

TEST(ExpertOrder, RanksThatUseTheirExpertsAndRanksThatDoNotComeToAllBucketsInOneOrder) {
  runThreads(2, [](ThreadRank& dense, ThreadRank& experts) {
    dense.backend->waitsForRanks = experts.backend->waitsForRanks = true;
    Rounds rounds(dense, experts);
    for (int round = 0; round < 3; ++round) {
      rounds.run(dense.rank == 0 ? std::vector<int>{2, 1, 0} : std::vector<int>{1, 0});
    }
    EXPECT_EQ(countOf(experts.backend->events, "allreduce 128"), 3U);
  });
}

void expectOrder(const ThreadRank& dense, const ThreadRank& experts, bool isLearned) {
  Rounds rounds(dense, experts);
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(rounds.run({0, 2, 1}), isLearned && round > 0
                                         ? (std::vector<std::string>{"allreduce 192", "allreduce 64"})
                                         : (std::vector<std::string>{"allreduce 64", "allreduce 192"}));
  }
}

TEST(ExpertOrder, ThatOfTheFirstRoundIsTakenOverWhereExpertsAreAmongTheDenseReplicas) {
  runThreads(2, [](ThreadRank& dense, ThreadRank& experts) { expectOrder(dense, experts, true); });
}

TEST(ExpertOrder, ThatByIndexStaysWhereSomeReplicasOfAnExpertAreNoDenseReplicasOfEachOther) {
  runGrid(2, 2, [](int, ThreadRank& row, ThreadRank& column) { expectOrder(row, column, false); });
}

}  // namespace
}  // namespace farandole::ddp
