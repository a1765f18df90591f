// Messages of CUDA tensors over UCX: what arrives, when, and in which order.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>
#include <random>
#include <thread>
#include <tuple>

#include "tests/backend/c10d/cuda/cuda_ranks.h"

namespace farandole::backend {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct Planned {
  int source;
  int target;
  int tag;
  std::int64_t size;
  at::ScalarType dtype;
  bool isOnCuda;
  int value;
  int senderStream;
  int receiverStream;
};

std::vector<Planned> planRound(std::mt19937& random, int ranks) {
  constexpr std::int64_t kSizes[] = {0, 1, 9, 1000, 8193, 70'000, 400'000};
  constexpr at::ScalarType kTypes[] = {at::kByte, at::kFloat, at::kBFloat16, at::kLong};
  std::vector<Planned> messages(1 + random() % 14);
  for (Planned& one : messages) {
    one = {static_cast<int>(random() % ranks),   static_cast<int>(random() % ranks),   static_cast<int>(random() % 3),
           kSizes[random() % std::size(kSizes)], kTypes[random() % std::size(kTypes)], random() % 4 != 0,
           static_cast<int>(1 + random() % 250), static_cast<int>(random() % 3),       static_cast<int>(random() % 3)};
  }
  return messages;
}

struct Mine {
  const Planned* message;
  bool isSend;
  at::Tensor host;
};

// A rank's part of a round: in any order but for messages that match each other by their order.
std::vector<Mine> partOf(const std::vector<Planned>& messages, int rank, std::mt19937& random) {
  std::vector<Mine> mine;
  for (const Planned& one : messages) {
    for (const bool isSend : {true, false}) {
      if ((isSend ? one.source : one.target) != rank) continue;
      mine.push_back({&one, isSend, at::zeros({one.size}, one.dtype)});
    }
  }
  std::vector<Mine> shuffled = mine;
  std::ranges::shuffle(shuffled, random);
  const auto key = [](const Mine& one) {
    return std::tuple(one.isSend ? one.message->target : one.message->source, one.message->tag, one.isSend,
                      one.message->isOnCuda);
  };
  std::map<decltype(key(mine[0])), std::size_t> next;
  for (Mine& one : shuffled) {
    std::size_t& at = next[key(one)];
    while (key(mine[at]) != key(one)) ++at;
    one = mine[at++];
  }
  return shuffled;
}

void playRound(ProcessGroupFarandole& group, SimulatedCuda& simulated, const std::vector<Mine>& mine, bool isBatch) {
  std::vector<BatchEntry> batch;
  std::vector<WorkPtr> works;
  for (const Mine& one : mine) {
    const Planned& message = *one.message;
    // A batch is issued on one stream.
    simulated.use(isBatch ? 0 : one.isSend ? message.senderStream : message.receiverStream);
    if (message.isOnCuda) {
      simulated.fill(one.host, one.isSend ? message.value : 255);
    } else if (one.isSend) {
      one.host.view(-1).view(at::kByte).fill_(message.value);
    }
    at::Tensor tensor = message.isOnCuda ? onCuda(one.host, 0) : one.host;
    const int peer = one.isSend ? message.target : message.source;
    const auto direction = one.isSend ? p2p::Direction::kSend : p2p::Direction::kRecv;
    if (isBatch) {
      batch.push_back({direction, std::move(tensor), peer, message.tag});
      continue;
    }
    std::vector<at::Tensor> tensors{std::move(tensor)};
    works.push_back(one.isSend ? group.send(tensors, peer, message.tag) : group.recv(tensors, peer, message.tag));
  }
  simulated.use(0);
  if (isBatch) {
    for (auto& [peer, work] : group.batchP2p(std::move(batch), "")) works.push_back(work);
  }
  for (const WorkPtr& work : works) EXPECT_TRUE(work->wait());
}

TEST_P(UcxMessagesBetween, RandomBatchesAndSinglesOfBothKindsOfTensorsArriveAsPlanned) {
  constexpr int kRanks = 3;
  const auto seed = std::random_device{}();
  std::cout << "plan's seed " << seed << "\n";
  run(kRanks, [seed](ProcessGroupFarandole& group, SimulatedCuda& simulated) {
    std::mt19937 common(seed);
    std::mt19937 own(seed + 1 + static_cast<unsigned>(group.getRank()));
    for (int round = 0; round < 60; ++round) {
      const std::vector<Planned> messages = planRound(common, kRanks);
      const std::vector<Mine> mine = partOf(messages, group.getRank(), own);
      playRound(group, simulated, mine, own() % 2 == 0);
      for (const Mine& one : mine) {
        const at::Tensor expected = at::empty_like(one.host);
        expected.view(-1).view(at::kByte).fill_(one.message->value);
        const bool isSame = one.host.view(-1).view(at::kByte).equal(expected.view(-1).view(at::kByte));
        ASSERT_TRUE(isSame) << "round " << round << ", from " << one.message->source << " to " << one.message->target
                            << ", tag " << one.message->tag << ", size " << one.message->size;
      }
    }
  });
}

TEST_P(UcxMessagesBetween, AMessageWaitsForItsStreamAndHoldsUpOnlyThoseBehindItToTheSamePeer) {
  run(3, [](ProcessGroupFarandole& group, SimulatedCuda& simulated) {
    if (group.getRank() == 0) {
      const at::Tensor first = bytes(50'000);
      const at::Tensor second = bytes(50'000);
      const at::Tensor other = bytes(50'000);
      const at::Tensor incoming = bytes(50'000);
      simulated.cluster.hold(simulated.streams[0]);
      simulated.fill(first, 1);
      const auto start = Clock::now();
      const WorkPtr held = send(group, first, 1);
      EXPECT_LT(Clock::now() - start, 5s);  // the host does not wait for the stream
      simulated.use(1);
      simulated.fill(second, 2);
      const WorkPtr behind = send(group, second, 1);
      simulated.fill(other, 3);
      EXPECT_TRUE(send(group, other, 2)->wait());
      EXPECT_TRUE(recv(group, incoming, 1)->wait());
      EXPECT_TRUE(incoming.equal(bytes(50'000, 4)));
      EXPECT_FALSE(held->isCompleted());
      EXPECT_FALSE(behind->isCompleted());
      simulated.cluster.release(simulated.streams[0]);
      EXPECT_TRUE(held->wait());
      EXPECT_TRUE(behind->wait());
    } else if (group.getRank() == 1) {
      const at::Tensor first = bytes(50'000);
      const at::Tensor second = bytes(50'000);
      const at::Tensor mine = bytes(50'000, 4);
      const WorkPtr receiving = recv(group, first, 0);
      EXPECT_TRUE(send(group, mine, 0)->wait());
      EXPECT_TRUE(receiving->wait());
      EXPECT_TRUE(recv(group, second, 0)->wait());
      EXPECT_TRUE(first.equal(bytes(50'000, 1)));
      EXPECT_TRUE(second.equal(bytes(50'000, 2)));
    } else {
      const at::Tensor got = bytes(50'000);
      EXPECT_TRUE(recv(group, got, 0)->wait());
      EXPECT_TRUE(got.equal(bytes(50'000, 3)));
    }
  });
}

TEST(UcxMessages, AReceiveComesAfterWhatItsStreamDoesToTheBuffer) {
  runCudaRanks(2, [](ProcessGroupFarandole& group, SimulatedCuda& simulated) {
    for (const std::int64_t size : {8, 100'000}) {
      if (group.getRank() == 0) {
        const at::Tensor data = bytes(size, 7);
        send(group, data, 1)->wait();
      } else {
        const at::Tensor buffer = bytes(size);
        simulated.cluster.hold(simulated.streams[0]);
        simulated.fill(buffer, 200);
        const WorkPtr receiving = recv(group, buffer, 0);
        std::this_thread::sleep_for(20ms);
        EXPECT_FALSE(receiving->isCompleted());
        simulated.cluster.release(simulated.streams[0]);
        receiving->wait();
        EXPECT_TRUE(buffer.equal(bytes(size, 7)));
      }
    }
  });
}

TEST(UcxMessages, TagsAndReceivesFromAnyRankAreHonoured) {
  runCudaRanks(2, [](ProcessGroupFarandole& group, SimulatedCuda&) {
    if (group.getRank() == 0) {
      const at::Tensor five = bytes(3, 5);
      const at::Tensor six = bytes(3, 6);
      const at::Tensor nine = bytes(3, 9);
      for (const WorkPtr& work : {send(group, five, 1, 5), send(group, six, 1, 6), send(group, nine, 1, 9)})
        work->wait();
    } else {
      const at::Tensor five = bytes(3);
      const at::Tensor six = bytes(3);
      const at::Tensor nine = bytes(3);
      recv(group, six, 0, 6)->wait();
      recv(group, five, 0, 5)->wait();
      std::vector<at::Tensor> any{onCuda(nine, 0)};
      const WorkPtr work = group.recvAnysource(any, 9);
      work->wait();
      EXPECT_EQ(work->sourceRank(), 0);
      EXPECT_TRUE(five.equal(bytes(3, 5)) && six.equal(bytes(3, 6)) && nine.equal(bytes(3, 9)));
    }
  });
}

TEST_P(UcxMessagesBetween, AnotherDtypeOrSizeIsAnErrorThatNamesBothAndTheGroupGoesOn) {
  run(2, [](ProcessGroupFarandole& group, SimulatedCuda&) {
    const int peer = 1 - group.getRank();
    if (group.getRank() == 0) {
      send(group, at::ones({4}, at::kFloat), peer, 3)->wait();
      send(group, at::ones({5}, at::kFloat), peer, 4)->wait();
    } else {
      expectMentions(errorOf([&] { recv(group, at::ones({4}, at::kInt), peer, 3)->wait(); }),
                     {"Float", "Int", "rank 0", "tag 3"});
      expectMentions(errorOf([&] { recv(group, at::ones({4}, at::kFloat), peer, 4)->wait(); }),
                     {"5", "4", "rank 0", "tag 4"});
    }
    const at::Tensor in = bytes(10);
    const WorkPtr receiving = recv(group, in, peer);
    send(group, bytes(10, 8), peer)->wait();
    receiving->wait();
    EXPECT_TRUE(in.equal(bytes(10, 8)));
  });
}

TEST(UcxMessages, TensorsAreKeptUntilTheirMessageHasEndedAndNoLonger) {
  runCudaRanks(2, [](ProcessGroupFarandole& group, SimulatedCuda& simulated) {
    const at::Tensor data = bytes(1000, group.getRank() == 0 ? 6 : 0);
    if (group.getRank() == 0) {
      simulated.cluster.hold(simulated.streams[0]);
      const WorkPtr work = send(group, data, 1);
      EXPECT_GT(data.use_count(), 1);
      simulated.cluster.release(simulated.streams[0]);
      work->wait();
    } else {
      recv(group, data, 0)->wait();
      EXPECT_TRUE(data.equal(bytes(1000, 6)));
    }
    meet(group);
    for (int i = 0; i < 500 && data.use_count() > 1; ++i) std::this_thread::sleep_for(10ms);
    EXPECT_EQ(data.use_count(), 1);
  });
}

TEST(UcxMessages, ACaptureIsRefused) {
  runCudaRanks(2, [](ProcessGroupFarandole& group, SimulatedCuda& simulated) {
    simulated.cluster.beginCapture(simulated.streams[0]);
    const std::string error = errorOf([&] { send(group, bytes(4), 1 - group.getRank()); });
    simulated.cluster.endCapture(simulated.streams[0]);
    expectMentions(error, {"captured in a graph", "FARANDOLE_CUDA_MESSAGES is 'ucx'", "expected 'nccl'"});
    meet(group);
  });
}

TEST(UcxMessages, GroupsThatShareTheTransportAreKeptApartAndEndAlone) {
  runCudaRanks(2, [](ProcessGroupFarandole& group, SimulatedCuda&) {
    const int peer = 1 - group.getRank();
    for (int round = 0; round < 4; ++round) {
      const auto made = group.shrink({}, 0, nullptr);
      auto& child = dynamic_cast<ProcessGroupFarandole&>(*made);
      const at::Tensor ofParent = bytes(20'000);
      const at::Tensor ofChild = bytes(20'000);
      const WorkPtr works[] = {recv(group, ofParent, peer), recv(child, ofChild, peer),
                               send(child, bytes(20'000, 2), peer), send(group, bytes(20'000, 1), peer)};
      for (const WorkPtr& work : works) work->wait();
      EXPECT_TRUE(ofParent.equal(bytes(20'000, 1)) && ofChild.equal(bytes(20'000, 2)));
      const WorkPtr waiting = recv(child, ofChild, peer);
      child.shutdown();
      expectMentions(errorOf([&] { waiting->wait(); }), {"shut down"});
    }
  });
}

}  // namespace
}  // namespace farandole::backend
