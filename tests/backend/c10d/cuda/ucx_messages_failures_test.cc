// How messages of CUDA tensors over UCX end when they cannot go on.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "tests/backend/c10d/cuda/cuda_ranks.h"

namespace farandole::backend {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Where there is a GPU, too: UCX may not use it.
void enterWithoutCudaInUcx(int) {
  setenv("UCX_TLS", "tcp,self", 1);
  CudaEnvironment environment = *CudaEnvironment::current();
  environment.messageMemory = transport::UcxMemory::kCuda;
  CudaEnvironment::replace(new CudaEnvironment(environment));
}

TEST_P(UcxMessagesBetween, AKilledRankEndsWhatIsPendingAndHeldAndIsNamed) {
  run(
      3,
      [](ProcessGroupFarandole& group, SimulatedCuda& simulated) {
        const int rank = group.getRank();
        // Everybody knows everybody.
        for (int peer = 0; peer < 3; ++peer) {
          const at::Tensor in = bytes(5);
          const WorkPtr receiving = recv(group, in, peer);
          send(group, bytes(5, 1), peer)->wait();
          receiving->wait();
        }
        if (rank == 1) {
          std::this_thread::sleep_for(200ms);
          kill(getpid(), SIGKILL);
        }
        const at::Tensor buffers[] = {bytes(100), bytes(3'000'000), bytes(100)};
        simulated.use(1);
        const WorkPtr waiting = recv(group, buffers[0], 1);
        const WorkPtr sending = send(group, buffers[1], 1);
        simulated.use(0);
        simulated.cluster.hold(simulated.streams[0]);
        const WorkPtr held = send(group, buffers[2], 2 - rank);
        const auto start = Clock::now();
        for (const WorkPtr& work : {waiting, sending, held}) {
          expectMentions(errorOf([&] { work->wait(); }), {"rank 1 (", "failed"});
        }
        EXPECT_LT(Clock::now() - start, 15s);
        simulated.cluster.release(simulated.streams[0]);
        expectMentions(errorOf([&] { recv(group, buffers[0], 2 - rank)->wait(); }), {"rank 1 ("});
      },
      1);
}

TEST_P(UcxMessagesBetween, AnAbortEndsWhatIsPendingOnAllRanks) {
  run(2, [](ProcessGroupFarandole& group, SimulatedCuda&) {
    const at::Tensor buffer = bytes(100);
    const WorkPtr waiting = recv(group, buffer, 1 - group.getRank());
    if (group.getRank() == 0) {
      std::this_thread::sleep_for(100ms);
      group.abort();
      expectMentions(errorOf([&] { waiting->wait(); }), {"aborted", "recv from rank 1"});
    } else {
      const auto start = Clock::now();
      expectMentions(errorOf([&] { waiting->wait(); }), {"rank 0 (", "aborted"});
      EXPECT_LT(Clock::now() - start, 10s);
    }
    errorOf([&] { send(group, buffer, 1 - group.getRank())->wait(); });
  });
}

TEST_P(UcxMessagesBetween, ATimeoutNamesThePeerAndSaysWhenTheStreamIsWhatIsLate) {
  run(2, [](ProcessGroupFarandole& group, SimulatedCuda& simulated) {
    if (group.getRank() == 0) {
      const at::Tensor buffer = bytes(100);
      group.setTimeout(400ms);
      expectMentions(errorOf([&] { recv(group, buffer, 1)->wait(); }),
                     {"recv from rank 1 (", "not done after its timeout of 400 ms"});
      simulated.cluster.hold(simulated.streams[0]);
      const WorkPtr held = send(group, buffer, 1);
      expectMentions(errorOf([&] { held->wait(100ms); }), {"send to rank 1 (", "held up by a stream", "100 ms"});
      // Nobody waits for this one.
      const WorkPtr left = send(group, buffer, 1);
      for (int i = 0; i < 500 && !left->isCompleted(); ++i) std::this_thread::sleep_for(10ms);
      expectMentions(errorOf([&] { left->wait(); }), {"held up by a stream"});
      simulated.cluster.release(simulated.streams[0]);
      group.setTimeout(30s);
      send(group, bytes(100, 3), 1, 1)->wait();
    } else {
      const at::Tensor buffer = bytes(100);
      recv(group, buffer, 0, 1)->wait();
      EXPECT_TRUE(buffer.equal(bytes(100, 3)));
    }
  });
}

TEST(UcxMessages, AShutdownEndsWhatIsHeld) {
  runCudaRanks(2, [](ProcessGroupFarandole& group, SimulatedCuda& simulated) {
    simulated.cluster.hold(simulated.streams[0]);
    const WorkPtr held = send(group, bytes(4), 1 - group.getRank());
    group.shutdown();
    expectMentions(errorOf([&] { held->wait(); }), {"shut down"});
    simulated.cluster.release(simulated.streams[0]);
  });
}

TEST(UcxMessages, ARankThatLeavesEndsWhatWaitsForIt) {
  runCudaRanks(2, [](ProcessGroupFarandole& group, SimulatedCuda&) {
    const at::Tensor buffer = bytes(100);
    const WorkPtr first = recv(group, buffer, 1 - group.getRank());
    send(group, bytes(100), 1 - group.getRank())->wait();
    first->wait();
    if (group.getRank() == 1) return ProcessContext::leaveAtExit();
    const auto start = Clock::now();
    const WorkPtr waiting = recv(group, buffer, 1);
    expectMentions(errorOf([&] { waiting->wait(); }), {"recv from rank 1 (", "is gone"});
    expectMentions(errorOf([&] { send(group, bytes(3'000'000), 1)->wait(); }), {"send to rank 1 (", "is gone"});
    EXPECT_LT(Clock::now() - start, 10s);
  });
}

TEST(UcxMessages, AUcxWithoutCudaIsNamedByTheFirstMessageAndTensorsOnTheCpuGoOn) {
  runCudaRanks(
      2,
      [](ProcessGroupFarandole& group, SimulatedCuda&) {
        const int peer = 1 - group.getRank();
        expectMentions(errorOf([&] { send(group, bytes(4), peer); }),
                       {"FARANDOLE_CUDA_MESSAGES is 'ucx'", "UCX 1.", "knows no memory of CUDA",
                        "UCX_TLS is 'tcp,self'", "cuda_copy"});
        std::vector<at::Tensor> out{bytes(4, 2)};
        std::vector<at::Tensor> in{bytes(4)};
        const WorkPtr receiving = group.recv(in, peer, 0);
        group.send(out, peer, 0)->wait();
        receiving->wait();
        EXPECT_TRUE(in[0].equal(out[0]));
      },
      -1, &enterWithoutCudaInUcx);
}

TEST(UcxMessages, APeerWhoseUcxHasNoCudaIsNamed) {
  runCudaRanks(
      2,
      [](ProcessGroupFarandole& group, SimulatedCuda&) {
        const std::string error = errorOf([&] { send(group, bytes(4), 1 - group.getRank()); });
        expectMentions(error, {"knows no memory of CUDA"});
        if (group.getRank() == 0) expectMentions(error, {"rank 1 ("});
        meet(group);
      },
      -1,
      [](int rank) {
        if (rank == 1) enterWithoutCudaInUcx(rank);
      });
}

}  // namespace
}  // namespace farandole::backend
