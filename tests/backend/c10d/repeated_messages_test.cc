#include "backend/c10d/repeated_messages.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <new>
#include <random>
#include <thread>

#include "tests/backend/c10d/rank_processes.h"

namespace {

thread_local std::size_t numAllocations = 0;

}  // namespace

// What the test program and the libraries that it loads allocate.
void* operator new(std::size_t bytes) {
  ++numAllocations;
  if (void* const memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace farandole::backend {
namespace {

using namespace std::chrono_literals;

std::unique_ptr<RepeatedMessage> make(ProcessGroupFarandole& group, bool isSend, const at::Tensor& tensor,
                                      int tag = 0) {
  auto message =
      group.repeat({isSend, 1 - group.getRank(), tag, tensor.nbytes(), static_cast<int>(tensor.scalar_type())});
  TORCH_CHECK(message.isOk(), message.status().toString());
  return std::move(message).value();
}

Status once(RepeatedMessage& message, const at::Tensor& tensor) {
  message.start(tensor.data_ptr());
  return message.wait();
}

std::string errorOf(RepeatedMessage& message, const at::Tensor& tensor) { return once(message, tensor).toString(); }

void expectMentions(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
}

// That the group still works.
void exchangeWithTag(ProcessGroupFarandole& group, int tag) {
  std::vector<at::Tensor> mine{at::full({3}, static_cast<float>(group.getRank()))};
  std::vector<at::Tensor> theirs{at::zeros({3})};
  const auto received = group.recv(theirs, 1 - group.getRank(), tag);
  group.send(mine, 1 - group.getRank(), tag)->wait();
  received->wait();
  EXPECT_TRUE(theirs[0].equal(at::full({3}, 1.0f - static_cast<float>(group.getRank()))));
}

TEST(RepeatedMessages, MatchEachOtherAndPlainSendsAndReceives) {
  const auto seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  runRanks(2, 30s, [seed](ProcessGroupFarandole& group) {
    std::mt19937 random(seed);  // the same on both ranks
    for (const std::int64_t size : {0, 1, 8, 32, 33, 4096, 8192, 8193, 600'000}) {
      const auto options = at::TensorOptions(at::kByte);
      const at::Tensor like = at::empty({size}, options);
      const auto out = make(group, true, like, 5);
      const auto in = make(group, false, like, 5);
      for (int round = 0; round < 30; ++round) {
        const int sender = static_cast<int>(random() % 2);
        const bool isRepeated[2] = {random() % 2 == 0, random() % 2 == 0};
        std::vector<at::Tensor> data{at::empty({size}, options)};
        const auto byte = [&](std::int64_t i) { return static_cast<std::uint8_t>(round + 7 * i); };
        auto* const bytes = data[0].data_ptr<std::uint8_t>();
        const bool isMine = sender == group.getRank();
        for (std::int64_t i = 0; isMine && i < size; ++i) bytes[i] = byte(i);
        if (isRepeated[group.getRank()]) {
          const Status status = once(isMine ? *out : *in, data[0]);
          ASSERT_TRUE(status.isOk()) << status.toString();
        } else {
          (isMine ? group.send(data, 1 - sender, 5) : group.recv(data, sender, 5))->wait();
        }
        for (std::int64_t i = 0; i < size; ++i) ASSERT_EQ(bytes[i], byte(i)) << "size " << size << ", round " << round;
      }
    }
  });
}

TEST(RepeatedMessages, ManyAreUnderWayAtOnceAndInOrder) {
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    constexpr int kMessages = 50;
    std::vector<at::Tensor> data;
    std::vector<std::unique_ptr<RepeatedMessage>> messages;
    const bool isSend = group.getRank() == 0;
    for (int i = 0; i < kMessages; ++i) {
      data.push_back(isSend ? at::full({20'000}, i) : at::zeros({20'000}, at::kLong));
      messages.push_back(make(group, isSend, data[i]));
    }
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < kMessages; ++i) messages[i]->start(data[i].data_ptr());
      for (auto& message : messages) {
        const Status status = message->wait();
        ASSERT_TRUE(status.isOk()) << status.toString();
        EXPECT_TRUE(message->isDone());
      }
      for (int i = 0; i < kMessages; ++i) ASSERT_EQ(data[i][19'999].item<int>(), i);
    }
  });
}

TEST(RepeatedMessages, NothingStartedIsDone) {
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    const auto message = make(group, false, at::zeros({1}));
    EXPECT_TRUE(message->isDone());
    EXPECT_TRUE(message->wait().isOk());
  });
}

TEST(RepeatedMessages, ATimeoutIsFinalAndLeavesTheGroupUsable) {
  runRanks(2, 300ms, [](ProcessGroupFarandole& group) {
    const at::Tensor data = at::zeros({2});
    auto message = make(group, false, data, 3);
    const std::string first = errorOf(*message, data);
    expectMentions(first, {"repeated recv from rank", "tag 3, 8 bytes", "not done after its timeout of 300 ms"});
    const auto again = std::chrono::steady_clock::now();
    EXPECT_EQ(errorOf(*message, data), first);
    EXPECT_LT(std::chrono::steady_clock::now() - again, 250ms);
    auto buffer = std::make_shared<int>(1);
    const std::weak_ptr<int> seen = buffer;
    message->keep(std::move(buffer));
    message.reset();
    EXPECT_TRUE(seen.expired());  // nothing is in flight any more
    exchangeWithTag(group, 4);
  });
}

TEST(RepeatedMessages, WhatIsGivenUpReceivesNothingMore) {
  runRanks(2, 5s, [](ProcessGroupFarandole& group) {
    if (group.getRank() == 0) {
      auto buffer = std::make_shared<std::int64_t>(0);
      const std::weak_ptr<std::int64_t> seen = buffer;
      auto message = make(group, false, at::zeros({1}, at::kLong), 6);
      message->start(buffer.get());
      EXPECT_FALSE(message->isDone());
      message->keep(std::move(buffer));
      message.reset();
      EXPECT_TRUE(seen.expired());
    }
    exchangeWithTag(group, 7);
    std::vector<at::Tensor> data{at::full({1}, 42, at::kLong)};
    if (group.getRank() == 1) group.send(data, 0, 6)->wait();
    if (group.getRank() == 0) {
      data[0].zero_();
      group.recv(data, 1, 6)->wait();
      EXPECT_EQ(data[0].item<int>(), 42);
    }
  });
}

// Another thread, which waits for something else, completes them meanwhile.
TEST(RepeatedMessages, WhatIsKeptIsLetGoOfOnceHoweverSoonTheMessageIsGivenUp) {
  const auto seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  runRanks(2, 60s, [seed](ProcessGroupFarandole& group) {
    constexpr int kMessages = 3000;
    constexpr int kLast = kMessages;
    if (group.getRank() == 0) {
      for (int tag = 0; tag <= kLast; ++tag) {
        std::vector<at::Tensor> data{at::ones({2})};
        group.send(data, 1, tag)->wait();
      }
      return;
    }
    std::thread waiter([&] {
      std::vector<at::Tensor> data{at::zeros({2})};
      group.recv(data, 0, kLast)->wait();
    });
    std::mt19937 random(seed);
    std::atomic<int> released{0};
    for (int tag = 0; tag < kMessages; ++tag) {
      at::Tensor data = at::zeros({2});
      auto message = make(group, false, data, tag);
      message->start(data.data_ptr());
      message->keep(std::shared_ptr<void>(new at::Tensor(data), [&](void* kept) {
        delete static_cast<at::Tensor*>(kept);
        ++released;
      }));
      const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(random() % 3000);
      while (std::chrono::steady_clock::now() < until) {
      }
    }
    waiter.join();
    const auto end = std::chrono::steady_clock::now() + 10s;
    while (released < kMessages && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    EXPECT_EQ(released, kMessages);
  });
}

TEST(RepeatedMessages, AnotherDtypeIsAnErrorThatNamesBothSides) {
  runRanks(2, 5s, [](ProcessGroupFarandole& group) {
    const at::Tensor data = group.getRank() == 0 ? at::zeros({4}, at::kInt) : at::zeros({4}, at::kFloat);
    const auto message = make(group, group.getRank() == 1, data, 2);
    const Status status = once(*message, data);
    if (group.getRank() == 0) {
      expectMentions(status.toString(),
                     {"repeated recv from rank 1", "4 x Float (16 bytes", "4 x Int (16 bytes", "tag 2"});
    }
    exchangeWithTag(group, 4);
  });
}

TEST(RepeatedMessages, ADeadPeerIsNamed) {
  runRanks(
      2, 30s,
      [](ProcessGroupFarandole& group) {
        exchangeWithTag(group, 1);
        if (group.getRank() == 1) kill(getpid(), SIGKILL);
        const at::Tensor data = at::zeros({4});
        const auto message = make(group, false, data);
        expectMentions(errorOf(*message, data), {"repeated recv from rank 1", "failed", "its process died"});
      },
      1);
}

TEST(RepeatedMessages, EachIsInTheFlightRecorder) {
  runRanks(2, 300ms, [](ProcessGroupFarandole& group) {
    const bool isSend = group.getRank() == 0;
    const at::Tensor data = at::zeros({3, 2}, at::kShort);
    const auto message = make(group, isSend, data);
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(once(*message, data).isOk());
    EXPECT_EQ(isSend, isSend || once(*message, data).isOk());  // a third does not come
    const auto log = FlightLog::acquire();
    ASSERT_TRUE(log.isOk());
    const auto entries = (*log)->recorder()->snapshot().entries;
    ASSERT_EQ(entries.size(), isSend ? 2u : 3u);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const auto& [number, state, created, ended, record, error] = entries[i];
      EXPECT_STREQ(record.name, isSend ? "farandole:send" : "farandole:recv");
      EXPECT_EQ(record.peer, 1 - group.getRank());
      EXPECT_EQ(record.pointToPointNumber, i + 1);
      EXPECT_EQ(record.sizes[0], 6);
      EXPECT_EQ(state, i < 2 ? observe::FlightState::kCompleted : observe::FlightState::kFailed);
      EXPECT_GE(ended, created);
      EXPECT_EQ(error.empty(), i < 2);
    }
  });
}

TEST(RepeatedMessages, ShortOnesAllocateNothingOnceTheyRun) {
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    const at::Tensor data = at::zeros({8192}, at::kByte);
    const auto out = make(group, true, data);
    const auto in = make(group, false, data);
    const int peer = 1 - group.getRank();
    std::vector<at::Tensor> tensors{data};
    // Of 100 round trips, the fewest of several: a wait so long that it sleeps tells the event loop, which allocates.
    const auto allocationsOf = [&](const auto& move) {
      std::size_t fewest = SIZE_MAX;
      for (int run = 0; run < 30; ++run) {
        const std::size_t before = numAllocations;
        for (int i = 0; i < 100; ++i) {
          for (const bool isSend : {peer == 1, peer == 0}) move(isSend);
        }
        fewest = std::min(fewest, numAllocations - before);
      }
      return fewest;
    };
    const auto repeated = [&](bool isSend) { ASSERT_TRUE(once(isSend ? *out : *in, data).isOk()); };
    EXPECT_EQ(allocationsOf(repeated), 0u);
    const auto plain = [&](bool isSend) {
      (isSend ? group.send(tensors, peer, 0) : group.recv(tensors, peer, 0))->wait();
    };
    EXPECT_GE(allocationsOf(plain), 200u);  // for they are counted
  });
}

TEST(RepeatedMessages, AWrongSpecIsRefusedByName) {
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    const auto refusal = [&](const RepeatedMessageSpec& spec) { return group.repeat(spec).status().toString(); };
    expectMentions(refusal({.isSend = true, .peer = 2, .tag = 0, .bytes = 4, .dtype = 6}),
                   {"peer is 2", "from 0 to 1"});
    expectMentions(refusal({.isSend = true, .peer = 1, .tag = -1, .bytes = 4, .dtype = 6}), {"tag is -1", "0 or more"});
    expectMentions(refusal({.isSend = true, .peer = 1, .tag = 0, .bytes = 4, .dtype = -3}), {"dtype is -3"});
  });
}

}  // namespace
}  // namespace farandole::backend
