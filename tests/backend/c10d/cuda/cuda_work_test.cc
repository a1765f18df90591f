// What the works of the CUDA half tell of their ends, on simulated devices.
#include "backend/c10d/tensor_checks.h"
#include "tests/backend/c10d/cuda/nccl_groups.h"

namespace farandole::backend {
namespace {

using ::c10d::ReduceOp;
using ::c10d::WorkResult;
using testing::NcclGroupTest;
using testing::onCuda;
using testing::OpType;
using testing::WorkPtr;
using namespace std::chrono_literals;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class CudaWorkTest : public NcclGroupTest {
 protected:
  WorkPtr issue(int rank) {
    const Reducing reducing = CudaGroup::reducing("all_reduce", sum_, at::kFloat);
    return groups_[rank]->run(options(rank, OpType::ALLREDUCE), device(rank), true, {onCuda(data_[rank], rank)}, {},
                              [&](CollectiveCalls& calls) { calls.allReduce(reducing, sliceOf(data_[rank])); });
  }
  static WorkResult resultIn(const FuturePtr& future) {
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    while (!future->completed() && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(future->completed());
    return future->completed() ? static_cast<WorkResult>(future->value().toInt()) : WorkResult::UNKNOWN;
  }

  const ReduceOp sum_ = ReduceOp::SUM;
  std::vector<at::Tensor> data_{at::ones({4}), at::ones({4}), at::ones({4})};
};

TEST_F(CudaWorkTest, ItsResultIsToldOnceTheDeviceIsDone) {
  cluster_->hold(streams_[0]);
  std::vector<WorkPtr> works(kSize);
  each([&](int rank) { works[rank] = issue(rank); });
  const FuturePtr result = works[0]->getFutureResult();
  EXPECT_EQ(works[0]->getFutureResult(), result);
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(result->completed());
  cluster_->release(streams_[0]);
  EXPECT_EQ(resultIn(result), WorkResult::SUCCESS);
  EXPECT_TRUE(at::equal(data_[0], at::full({4}, 3.0f)));
  for (const WorkPtr& work : works) EXPECT_EQ(resultIn(work->getFutureResult()), WorkResult::SUCCESS);
  // Of one that is done it is complete at once.
  EXPECT_TRUE(works[0]->isCompleted());
  works.clear();
  close();
}

TEST_F(CudaWorkTest, ItsResultIsNoErrorWhereItHasFailed) {
  each([&](int rank) { issue(rank)->wait(20s); });
  const WorkPtr alone = issue(0);
  const FuturePtr result = alone->getFutureResult();
  groups_[0]->abort(Status::timeout("as if it were late"));
  EXPECT_EQ(resultIn(result), WorkResult::TIMEOUT);
  EXPECT_EQ(resultIn(alone->getFutureResult()), WorkResult::TIMEOUT);
  for (int rank = 1; rank < kSize; ++rank) groups_[rank]->abort(Status::aborted("and the others"));
}

TEST_F(CudaWorkTest, MessagesOfABatchHaveOneResult) {
  std::vector<at::Tensor> received{at::zeros({4}), at::zeros({4}), at::zeros({4})};
  each([&](int rank) {
    const int right = (rank + 1) % kSize;
    const int left = (rank + kSize - 1) % kSize;
    auto works = groups_[rank]->post(
        options(rank, OpType::COALESCED), device(rank),
        {{true, onCuda(data_[rank], rank), right, 0}, {false, onCuda(received[rank], rank), left, 0}});
    for (auto& [peer, work] : works) EXPECT_EQ(resultIn(work->getFutureResult()), WorkResult::SUCCESS);
  });
  close();
}

}  // namespace
}  // namespace farandole::backend
