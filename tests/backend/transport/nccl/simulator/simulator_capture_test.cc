#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "tests/backend/transport/nccl/simulator/simulated_ranks.h"

namespace farandole::testing {
namespace {

class SimulatorCapture : public ::testing::Test {
 protected:
  void SetUp() override {
    ranks_.join();
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(cuda_.setDevice(rank), cudaSuccess);
      EXPECT_EQ(cuda_.eventCreate(&events_[rank], cudaEventDisableTiming), cudaSuccess);
      own_[rank] = ranks_.cluster.userStream(rank);
    }
    EXPECT_EQ(cuda_.setDevice(0), cudaSuccess);
  }
  // An all_reduce on a stream of its own beside the user's, as a transport puts it.
  void reduceBeside(int rank, bool joins = true) {
    wait(rank, ranks_.stream(rank), own_[rank]);
    EXPECT_EQ(
        ranks_.nccl.allReduce(&values_[rank], &values_[rank], 1, ncclInt32, ncclSum, ranks_.comm(rank), own_[rank]),
        ncclSuccess);
    if (joins) wait(rank, own_[rank], ranks_.stream(rank));
  }
  void wait(int rank, cudaStream_t before, cudaStream_t after) {
    EXPECT_EQ(cuda_.eventRecord(events_[rank], before), cudaSuccess);
    EXPECT_EQ(cuda_.streamWaitEvent(after, events_[rank], 0), cudaSuccess);
  }
  cudaStreamCaptureStatus statusOf(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusInvalidated;
    EXPECT_EQ(cuda_.streamIsCapturing(stream, &status), cudaSuccess);
    return status;
  }

  SimulatedRanks ranks_{2};
  const transport::CudaApi& cuda_ = ranks_.cuda;
  std::array<cudaEvent_t, 2> events_ = {};
  std::array<cudaStream_t, 2> own_ = {};
  std::array<int, 2> values_ = {};
};

TEST_F(SimulatorCapture, AGraphRunsWhatWasCapturedOnAllItsStreamsEachTimeItIsLaunched) {
  std::array<int, 2> seen = {};
  ranks_.each([&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    ranks_.cluster.beginCapture(ranks_.stream(rank));
    EXPECT_EQ(statusOf(ranks_.stream(rank)), cudaStreamCaptureStatusActive);
    EXPECT_EQ(statusOf(own_[at]), cudaStreamCaptureStatusNone);
    ranks_.cluster.enqueue(ranks_.stream(rank), [this, at] { values_[at] = static_cast<int>(at) + 1; });
    reduceBeside(rank);
    EXPECT_EQ(statusOf(own_[at]), cudaStreamCaptureStatusActive);
    ranks_.cluster.enqueue(ranks_.stream(rank), [this, at, &seen] { seen[at] += values_[at]; });
    ranks_.cluster.endCapture(ranks_.stream(rank));
    EXPECT_EQ(statusOf(own_[at]), cudaStreamCaptureStatusNone);
    EXPECT_TRUE(ranks_.synchronize(rank));
    EXPECT_EQ(seen[at], 0);  // nothing ran
    for (int launch = 1; launch <= 10; ++launch) {
      ranks_.cluster.replay(ranks_.stream(rank));
      EXPECT_TRUE(ranks_.synchronize(rank));
      EXPECT_EQ(seen[at], 3 * launch);
    }
  });
  EXPECT_TRUE(ranks_.cluster.violations().empty());
}

TEST_F(SimulatorCapture, AStreamThatIsNotJoinedIsReported) {
  ranks_.cluster.beginCapture(ranks_.stream(0));
  reduceBeside(0, false);
  ranks_.cluster.endCapture(ranks_.stream(0));
  EXPECT_TRUE(ranks_.violated("was not joined"));
}

TEST_F(SimulatorCapture, AnEventOfACaptureCannotBeQueriedNorOneFromOutsideWaitedFor) {
  cudaEvent_t outside = nullptr;
  EXPECT_EQ(cuda_.eventCreate(&outside, 0), cudaSuccess);
  EXPECT_EQ(cuda_.eventRecord(outside, own_[0]), cudaSuccess);
  ranks_.cluster.beginCapture(ranks_.stream(0));
  EXPECT_EQ(cuda_.streamWaitEvent(ranks_.stream(0), outside, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(cuda_.eventRecord(events_[0], ranks_.stream(0)), cudaSuccess);
  ranks_.cluster.endCapture(ranks_.stream(0));
  EXPECT_EQ(cuda_.eventQuery(events_[0]), cudaErrorCapturedEvent);
  EXPECT_TRUE(ranks_.violated("last recorded in a capture"));
}

TEST_F(SimulatorCapture, QueriesDuringACaptureNeedAModeThatAllowsThem) {
  ranks_.cluster.beginCapture(ranks_.stream(0));
  std::thread([&] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    EXPECT_EQ(cuda_.threadExchangeCaptureMode(&mode), cudaSuccess);
    EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
    EXPECT_EQ(cuda_.eventQuery(events_[0]), cudaSuccess);
    EXPECT_TRUE(ranks_.cluster.violations().empty());
    EXPECT_EQ(cuda_.threadExchangeCaptureMode(&mode), cudaSuccess);
    EXPECT_EQ(mode, cudaStreamCaptureModeThreadLocal);
    EXPECT_EQ(cuda_.eventQuery(events_[0]), cudaErrorStreamCaptureUnsupported);
  }).join();
  EXPECT_TRUE(ranks_.violated("capture mode"));
  ranks_.cluster.endCapture(ranks_.stream(0));
}

}  // namespace
}  // namespace farandole::testing
