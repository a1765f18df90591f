#include "backend/c10d/work_hooks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "tests/backend/c10d/rank_processes.h"
#include "tests/random_seed.h"

namespace farandole::backend {
namespace {

using namespace std::chrono_literals;

// What a completion hook was told, by any thread.
struct Heard {
  std::mutex mutex;
  std::vector<std::uint64_t> keys;
  std::vector<float> durations;  // ms
};

// Templates, so that they compile with torch 2.11, which has no such hooks.
template <typename Hook>
constexpr bool kHasHooks = !std::is_same_v<Hook, std::function<void()>>;

template <typename Hook = CompletionHook>
void listen(ProcessGroupFarandole& group, std::int64_t id, Heard& heard) {
  if constexpr (kHasHooks<Hook>) {
    group.registerCompletionHook(id, [&heard](const auto& completion) {
      std::lock_guard lock(heard.mutex);
      heard.keys.push_back(completion.completionKey);
      heard.durations.push_back(completion.duration_ms.value());
    });
  }
}

template <typename Hook = CompletionHook>
void listenAndThrow(ProcessGroupFarandole& group, std::int64_t id, std::atomic<int>& calls) {
  if constexpr (kHasHooks<Hook>) {
    group.registerCompletionHook(id, [&calls](const auto&) {
      ++calls;
      throw std::runtime_error("this hook always throws");
    });
  }
}

template <typename Work>
std::uint64_t keyOf(Work& work) {
  if constexpr (requires { work.getCompletionKey(); }) return work.getCompletionKey();
  return 0;
}

WorkPtr allReduce(ProcessGroupFarandole& group, at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return group.allreduce(tensors, {});
}

#define FARANDOLE_SKIP_WITHOUT_HOOKS() \
  if (!kHasHooks<CompletionHook>) GTEST_SKIP() << "this torch has no completion hooks"

TEST(WorkHooks, CompletionHooksHearOnceOfEachWorkThatSucceeds) {
  FARANDOLE_SKIP_WITHOUT_HOOKS();
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    Heard heard;
    Heard gone;
    listen(group, 1, heard);
    listen(group, 2, gone);
    group.unregisterCompletionHook(2);
    std::vector<std::uint64_t> keys;
    for (int i = 0; i < 5; ++i) {
      at::Tensor ones = at::ones({100});
      const WorkPtr work = allReduce(group, ones);
      keys.push_back(keyOf(*work));
      work->wait();
    }
    group.waitForPendingWorks();
    EXPECT_EQ(heard.keys, keys);
    for (const float duration : heard.durations) {
      EXPECT_GE(duration, 0);
      EXPECT_LT(duration, 30'000);
    }
    EXPECT_TRUE(gone.keys.empty());
    group.unregisterCompletionHook(1);
    at::Tensor ones = at::ones({1});
    allReduce(group, ones)->wait();
    EXPECT_EQ(heard.keys.size(), 5U);
  });
}

// What was heard, in order.
std::vector<std::uint64_t> sorted(std::vector<std::uint64_t> keys) {
  std::ranges::sort(keys);
  return keys;
}

TEST(WorkHooks, CompletionHooksHearOnceOfEachOperationOfABatch) {
  FARANDOLE_SKIP_WITHOUT_HOOKS();
  runRanks(3, 30s, [](ProcessGroupFarandole& group) {
    Heard heard;
    std::vector<std::uint64_t> keys;
    listen(group, 1, heard);
    for (int i = 0; i < 3; ++i) {
      group.startCoalescing();
      for (int peer = 0; peer < 3; ++peer) {  // itself, too
        std::vector<at::Tensor> sent{at::ones({10})};
        std::vector<at::Tensor> received{at::zeros({10})};
        // c10d keeps none of these works.
        keys.push_back(keyOf(*group.send(sent, peer, i)));
        keys.push_back(keyOf(*group.recv(received, peer, i)));
      }
      at::Tensor ones = at::ones({1});
      keys.push_back(keyOf(*allReduce(group, ones)));
      group.endCoalescing()->wait();
    }
    group.waitForPendingWorks();
    EXPECT_EQ(sorted(heard.keys), sorted(keys));
    EXPECT_EQ(std::set(keys.begin(), keys.end()).size(), 3U * 7U);
    group.unregisterCompletionHook(1);
  });
}

TEST(WorkHooks, CompletionHooksHearOnceOfASumOfSparseTensors) {
  FARANDOLE_SKIP_WITHOUT_HOOKS();
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    Heard heard;
    listen(group, 1, heard);
    std::vector<std::uint64_t> keys;
    for (int i = 0; i < 3; ++i) {
      at::Tensor sparse = at::eye(4).to_sparse();
      const WorkPtr work = allReduce(group, sparse);
      keys.push_back(keyOf(*work));
      work->wait();
      EXPECT_TRUE(at::equal(sparse.to_dense(), 2 * at::eye(4)));
    }
    group.waitForPendingWorks();
    EXPECT_EQ(heard.keys, keys);
    EXPECT_EQ(std::set(keys.begin(), keys.end()).size(), 3U);
    group.unregisterCompletionHook(1);
  });
}

TEST(WorkHooks, CompletionHooksHearOfNothingThatTorchWasGivenNoWorkOf) {
  FARANDOLE_SKIP_WITHOUT_HOOKS();
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    Heard heard;
    listen(group, 1, heard);
    group.monitoredBarrier({}, true);
    group.waitForPendingWorks();
    EXPECT_TRUE(heard.keys.empty());
    group.unregisterCompletionHook(1);
  });
}

// What PartsReport hands on of random parts, which end in any order and on several threads.
TEST(PartsReport, TellsOfEachPartAndOnceOfAll) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(testing::someSeed()));
  for (int round = 0; round < 200; ++round) {
    std::mutex mutex;
    std::vector<WorkReport> heard;
    auto report = PartsReport::of(WorkHooks::OnDone([&](const WorkReport& one) {
      std::lock_guard lock(mutex);
      heard.push_back(one);
    }));
    const std::chrono::steady_clock::time_point start{};
    std::vector<WorkReport> parts;
    std::vector<WorkHooks::OnDone> calls;
    const int numParts = static_cast<int>(random() % 5);
    for (int i = 0; i < numParts; ++i) {
      parts.push_back({::c10d::OpType::SEND,
                       random() % 100,
                       {i + 1UL},
                       random() % 4 != 0,
                       start + std::chrono::milliseconds(random() % 50),
                       start + std::chrono::milliseconds(50 + random() % 50)});
      calls.push_back(report->expect());
    }
    std::vector<std::future<void>> ends;
    for (int i = 0; i < numParts; ++i) ends.push_back(std::async(std::launch::async, [&, i] { calls[i](parts[i]); }));
    report->close();
    for (auto& end : ends) end.get();
    if (numParts == 0) {
      EXPECT_TRUE(heard.empty());
      continue;
    }
    ASSERT_EQ(heard.size(), parts.size() + 1);
    const WorkReport whole = heard.back();
    EXPECT_EQ(whole.of, WorkReport::Of::kParts);
    EXPECT_EQ(whole.type, ::c10d::OpType::COALESCED);
    EXPECT_TRUE(whole.keys.empty());
    const auto inOrder = [](auto field) {
      return [field](const WorkReport& a, const WorkReport& b) { return a.*field < b.*field; };
    };
    EXPECT_EQ(whole.sequence, std::ranges::min_element(parts, inOrder(&WorkReport::sequence))->sequence);
    EXPECT_EQ(whole.started, std::ranges::min_element(parts, inOrder(&WorkReport::started))->started);
    EXPECT_EQ(whole.finished, std::ranges::max_element(parts, inOrder(&WorkReport::finished))->finished);
    EXPECT_EQ(whole.isSuccess, std::ranges::all_of(parts, &WorkReport::isSuccess));
    std::set<std::uint64_t> keys;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(heard[i].of, WorkReport::Of::kPart);
      keys.insert(heard[i].keys[0]);
    }
    EXPECT_EQ(keys.size(), parts.size());
  }
  EXPECT_EQ(PartsReport::of({}), nullptr);
}

TEST(WorkHooks, CompletionHooksHearNothingOfAFailure) {
  FARANDOLE_SKIP_WITHOUT_HOOKS();
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    Heard heard;
    std::atomic<int> failures{0};
    listen(group, 1, heard);
    group.registerAbortHook(1, [&] { ++failures; });
    if (group.getRank() == 0) {
      std::vector<at::Tensor> into{at::zeros({1})};
      EXPECT_THROW(group.recv(into, 1, 7)->wait(50ms), c10::Error);  // rank 1 sends nothing
      group.waitForPendingWorks();
      EXPECT_EQ(failures, 1);
      EXPECT_TRUE(heard.keys.empty());
    }
    at::Tensor ones = at::ones({1});
    allReduce(group, ones)->wait();
    group.waitForPendingWorks();
    EXPECT_EQ(heard.keys.size(), 1U);
    group.unregisterAbortHook(1);
    group.unregisterCompletionHook(1);
  });
}

TEST(WorkHooks, AbortHooksRunOnceMoreForAllThatFailsMeanwhile) {
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    std::atomic<int> calls{0};
    std::promise<void> allFailed;
    group.registerAbortHook(1, [&, done = allFailed.get_future().share()] {
      ++calls;
      EXPECT_EQ(done.wait_for(20s), std::future_status::ready);
    });
    if (group.getRank() == 0) {
      for (int i = 0; i < 5; ++i) {
        std::vector<at::Tensor> into{at::zeros({1})};
        EXPECT_THROW(group.recv(into, 1, 7)->wait(20ms), c10::Error);  // rank 1 sends nothing
      }
      allFailed.set_value();
      group.waitForPendingWorks();
      EXPECT_EQ(calls, 2);
    }
    at::Tensor ones = at::ones({1});
    allReduce(group, ones)->wait();
    group.unregisterAbortHook(1);
  });
}

// Where nobody else listens: of what is pending when it fails, alone and in a batch, and of what fails as it begins.
TEST(WorkHooks, AbortHooksHearOfEachFailureAndOfNothingElse) {
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    std::atomic<int> calls{0};
    group.registerAbortHook(1, [&] { ++calls; });
    const auto callsSoFar = [&] {
      group.waitForPendingWorks();
      return calls.load();
    };
    const int peer = 1 - group.getRank();
    std::vector<at::Tensor> from{at::ones({1})};
    std::vector<at::Tensor> into{at::zeros({1})};
    const auto exchange = [&](int tag) {
      group.startCoalescing();
      group.send(from, peer, 0);
      group.recv(into, peer, tag);
      return group.endCoalescing();
    };
    at::Tensor ones = at::ones({1});
    allReduce(group, ones)->wait();
    exchange(0)->wait();
    EXPECT_EQ(callsSoFar(), 0);
    if (group.getRank() == 0) {
      EXPECT_THROW(group.recv(into, 1, 7)->wait(20ms), c10::Error);  // rank 1 sends nothing
      EXPECT_EQ(callsSoFar(), 1);
      EXPECT_THROW(exchange(7)->wait(20ms), c10::Error);
      EXPECT_EQ(callsSoFar(), 2);
    }
    allReduce(group, ones)->wait();
    if (group.getRank() == 1) {
      group.send(from, 0, 1);
    } else {
      group.recv(into, 1, 1)->wait();  // an abort would be its error, too
      group.abort();
      EXPECT_EQ(callsSoFar(), 3);
      EXPECT_THROW(group.recv(into, 1, 0)->wait(), c10::Error);
      EXPECT_EQ(callsSoFar(), 4);
    }
    group.unregisterAbortHook(1);
    group.waitForPendingWorks();
  });
}

TEST(WorkHooks, AHookThatThrowsHarmsNeitherTheWorkNorOtherHooks) {
  FARANDOLE_SKIP_WITHOUT_HOOKS();
  runRanks(2, 30s, [](ProcessGroupFarandole& group) {
    Heard heard;
    std::atomic<int> calls{0};
    listenAndThrow(group, 1, calls);
    listen(group, 2, heard);
    for (int i = 0; i < 3; ++i) {
      at::Tensor ones = at::ones({10});
      allReduce(group, ones)->wait();
      EXPECT_TRUE(at::equal(ones, at::full({10}, 2.0)));
    }
    group.waitForPendingWorks();
    EXPECT_EQ(calls, 3);
    EXPECT_EQ(heard.keys.size(), 3U);
    group.unregisterCompletionHook(1);
    group.unregisterCompletionHook(2);
  });
}

}  // namespace
}  // namespace farandole::backend
