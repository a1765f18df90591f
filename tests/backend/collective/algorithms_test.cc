#include "backend/collective/algorithms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>

#include "tests/backend/collective/communicators.h"
#include "tests/backend/collective/slices.h"
#include "tests/backend/collective/sums.h"

namespace farandole::collective {
namespace {

using testing::Group;
using testing::sliceOf;
using testing::slicesOf;
using testing::TestOperation;
using Data = std::vector<std::int64_t>;

constexpr Reduction kSum = testing::kSumOf<std::int64_t>;

Data randomData(std::mt19937_64& random, std::size_t size) {
  Data data(size);
  for (std::int64_t& x : data) x = static_cast<std::int64_t>(random() % 1000);
  return data;
}

// Sizes around every switch of algorithm, and odd ones.
std::size_t randomSize(std::mt19937_64& random) {
  constexpr std::size_t kSizes[] = {0,    1,    2,    3,    7,    511,    512,    513,    1024,
                                    1025, 4096, 5000, 8192, 8193, 65'536, 70'000, 200'001};
  return kSizes[random() % std::size(kSizes)];
}

// Runs `build` on every rank of random groups, asynchronously, then checks.
class AlgorithmsTest : public ::testing::TestWithParam<std::size_t> {
 protected:
  using Build = std::function<void(Program&, Topology)>;

  void forRandomGroups(const std::function<void(std::mt19937_64&, int size)>& test) {
    for (std::uint64_t seed = 1; seed <= 25; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      std::mt19937_64 random(seed);
      test(random, 1 + static_cast<int>(random() % 7));
      if (HasFatalFailure()) return;
    }
  }

  void runOnAll(int size, const Build& build) {
    Group group(size, GetParam());
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (int rank = 0; rank < size; ++rank) {
      Program program;
      build(program, group[rank]->topology());
      operations.push_back(TestOperation::launch(group[rank], std::move(program), 1));
    }
    for (auto& operation : operations) {
      ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(60)));
      ASSERT_TRUE(operation->status()) << operation->status().toString();
    }
  }
};

TEST_P(AlgorithmsTest, BroadcastGivesEveryRankTheRootsData) {
  forRandomGroups([&](std::mt19937_64& random, int size) {
    const int root = static_cast<int>(random() % size);
    std::vector<Data> data(size, Data(randomSize(random), -1));
    data[root] = randomData(random, data[root].size());
    runOnAll(size, [&](Program& p, Topology t) { broadcast(p, t, root, sliceOf(data[t.rank])); });
    for (const Data& d : data) EXPECT_EQ(d, data[root]);
  });
}

// Fills `data` for each rank; returns the sum of all.
Data sumOfRandom(std::mt19937_64& random, int size, std::size_t n, std::vector<Data>& data) {
  Data sum(n, 0);
  for (int rank = 0; rank < size; ++rank) {
    data.push_back(randomData(random, n));
    for (std::size_t i = 0; i < n; ++i) sum[i] += data[rank][i];
  }
  return sum;
}

TEST_P(AlgorithmsTest, AllReduceAndReduceGiveTheSum) {
  forRandomGroups([&](std::mt19937_64& random, int size) {
    const std::size_t n = randomSize(random);
    const int root = static_cast<int>(random() % size);
    std::vector<Data> data;
    const Data expected = sumOfRandom(random, size, n, data);
    const std::vector<Data> inputs = data;
    runOnAll(size, [&](Program& p, Topology t) { reduce(p, t, kSum, root, sliceOf(data[t.rank])); });
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ(data[rank], rank == root ? expected : inputs[rank]);
    data = inputs;
    runOnAll(size, [&](Program& p, Topology t) { allReduce(p, t, kSum, sliceOf(data[t.rank])); });
    for (const Data& d : data) EXPECT_EQ(d, expected);
  });
}

// `data` in slices, each where it is or copied to its place in `elsewhere`, which has the same size.
std::vector<Slice> scattered(std::mt19937_64& random, Data& data, Data& elsewhere) {
  std::vector<Slice> slices;
  for (std::size_t at = 0; at < data.size();) {
    const std::size_t count = std::min<std::size_t>(data.size() - at, random() % (data.size() + 1));
    Data& from = random() % 2 == 0 ? data : elsewhere;
    const auto begin = static_cast<std::ptrdiff_t>(at);
    std::copy_n(data.begin() + begin, count, from.begin() + begin);
    slices.push_back({sliceOf(from).data + at * sizeof(from[0]), count * sizeof(from[0])});
    at += count;
  }
  return slices;
}

Data together(const std::vector<Slice>& slices, std::size_t size) {
  Data data(size);
  Gathered(slices).forEach(0, size * sizeof(data[0]), [&](std::size_t place, Slice slice) {
    std::memcpy(sliceOf(data).data + place, slice.data, slice.bytes);
  });
  return data;
}

TEST_P(AlgorithmsTest, AllReduceReadsWhatLiesInSeveralPlaces) {
  forRandomGroups([&](std::mt19937_64& random, int size) {
    const std::size_t n = randomSize(random);
    std::vector<Data> data;
    const Data expected = sumOfRandom(random, size, n, data);
    const std::vector<Data> inputs = data;
    std::vector<Data> outputs(size, Data(n, -1));
    std::vector<std::vector<Slice>> places(size);
    for (int rank = 0; rank < size; ++rank) places[rank] = scattered(random, data[rank], outputs[rank]);
    const int inPlace = static_cast<int>(random() % size);  // this rank calls the other form
    outputs[inPlace] = data[inPlace];
    runOnAll(size, [&](Program& p, Topology t) {
      if (t.rank == inPlace) return allReduce(p, t, kSum, sliceOf(outputs[t.rank]));
      allReduce(p, t, kSum, Gathered(places[t.rank]), sliceOf(outputs[t.rank]));
    });
    for (const Data& d : outputs) EXPECT_EQ(d, expected);
    EXPECT_EQ(data, inputs);
  });
}

// Of groups whose ranks share memory.
class SharedMemoryAlgorithmsTest : public AlgorithmsTest {};

TEST_P(SharedMemoryAlgorithmsTest, AllReduceLeavesTheResultInSeveralPlaces) {
  forRandomGroups([&](std::mt19937_64& random, int size) {
    if (size == 1) return;  // it shares none
    const std::size_t n = randomSize(random);
    std::vector<Data> data;
    const Data expected = sumOfRandom(random, size, n, data);
    std::vector<Data> elsewhere(size, Data(n, -1));
    std::vector<std::vector<Slice>> places(size);
    for (int rank = 0; rank < size; ++rank) places[rank] = scattered(random, data[rank], elsewhere[rank]);
    const int inOne = static_cast<int>(random() % size);  // this rank calls the other form
    data[inOne] = together(places[inOne], n);
    runOnAll(size, [&](Program& p, Topology t) {
      if (t.rank == inOne) return allReduce(p, t, kSum, sliceOf(data[t.rank]));
      allReduceInPlaces(p, t, kSum, Gathered(places[t.rank]));
    });
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(rank == inOne ? data[rank] : together(places[rank], n), expected);
    }
  });
}

TEST_P(AlgorithmsTest, GatherScatterAndAllGatherMoveUnevenPieces) {
  forRandomGroups([&](std::mt19937_64& random, int size) {
    const int root = static_cast<int>(random() % size);
    std::vector<Data> pieces(size);
    for (Data& piece : pieces) piece = randomData(random, randomSize(random));
    const auto emptyPieces = [&] {
      std::vector<Data> empty = pieces;
      for (Data& piece : empty) std::ranges::fill(piece, -1);
      return empty;
    };
    std::vector<std::vector<Data>> gathered(size, emptyPieces());
    runOnAll(size,
             [&](Program& p, Topology t) { allGather(p, t, sliceOf(pieces[t.rank]), slicesOf(gathered[t.rank])); });
    for (const auto& all : gathered) EXPECT_EQ(all, pieces);

    std::vector<Data> atRoot = emptyPieces();
    runOnAll(size, [&](Program& p, Topology t) { gather(p, t, root, sliceOf(pieces[t.rank]), slicesOf(atRoot)); });
    EXPECT_EQ(atRoot, pieces);

    std::vector<Data> scattered = emptyPieces();
    runOnAll(size, [&](Program& p, Topology t) { scatter(p, t, root, sliceOf(scattered[t.rank]), slicesOf(pieces)); });
    EXPECT_EQ(scattered, pieces);
  });
}

TEST_P(AlgorithmsTest, AllToAllAndReduceScatterDeliverEveryPiece) {
  forRandomGroups([&](std::mt19937_64& random, int size) {
    // pieces[i][j] goes from rank i to rank j; in a reduce-scatter all pieces[.][j] are alike in size.
    std::vector<std::vector<Data>> pieces(size);
    std::vector<std::vector<Data>> received(size);
    std::vector<Data> reduced;
    std::vector<Data> expected;
    for (int j = 0; j < size; ++j) {
      const std::size_t n = randomSize(random);
      expected.emplace_back(n, 0);
      reduced.emplace_back(n, -1);
      for (int i = 0; i < size; ++i) {
        pieces[i].push_back(randomData(random, n));
        received[j].emplace_back(n, -1);
        for (std::size_t k = 0; k < n; ++k) expected[j][k] += pieces[i][j][k];
      }
    }
    runOnAll(size,
             [&](Program& p, Topology t) { allToAll(p, t, slicesOf(received[t.rank]), slicesOf(pieces[t.rank])); });
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < size; ++j) EXPECT_EQ(received[j][i], pieces[i][j]);
    }
    runOnAll(size, [&](Program& p, Topology t) {
      reduceScatter(p, t, kSum, sliceOf(reduced[t.rank]), slicesOf(pieces[t.rank]));
    });
    EXPECT_EQ(reduced, expected);
  });
}

TEST_P(AlgorithmsTest, ReduceScatterReadsWhatLiesInSeveralPlaces) {
  forRandomGroups([&](std::mt19937_64& random, int size) {
    const std::size_t n = randomSize(random);
    std::vector<Data> data;
    Data expected(n * size, 0);
    for (int rank = 0; rank < size; ++rank) {
      data.push_back(randomData(random, n * size));
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += data[rank][i];
    }
    std::vector<Data> wholes(size, Data(n * size, -1));
    std::vector<std::vector<Slice>> places(size);
    for (int rank = 0; rank < size; ++rank) places[rank] = scattered(random, data[rank], wholes[rank]);
    runOnAll(size, [&](Program& p, Topology t) {
      const Slice whole = sliceOf(wholes[t.rank]);
      const std::size_t bytes = whole.bytes / size;
      reduceScatter(p, t, kSum, Gathered(places[t.rank]), whole, {whole.data + t.rank * bytes, bytes});
    });
    for (int rank = 0; rank < size; ++rank) {
      const auto at = static_cast<std::ptrdiff_t>(rank * n);
      EXPECT_TRUE(std::equal(wholes[rank].begin() + at, wholes[rank].begin() + at + static_cast<std::ptrdiff_t>(n),
                             expected.begin() + at));
    }
  });
}

TEST_P(AlgorithmsTest, NoRankLeavesABarrierBeforeTheLastHasEntered) {
  for (int size = 1; size <= 7; ++size) {
    Group group(size, GetParam());
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (int rank = 0; rank < size; ++rank) {
      for (auto& operation : operations) EXPECT_FALSE(operation->wait(transport::Clock::now()));
      Program program;
      barrier(program, group[rank]->topology());
      operations.push_back(TestOperation::launch(group[rank], std::move(program), 1));
    }
    for (auto& operation : operations) EXPECT_TRUE(operation->wait(transport::kNoDeadline));
  }
}

// Many collectives in flight at once, of kinds and sizes that use the same memory in different ways.
TEST_P(AlgorithmsTest, CollectivesThatAreInFlightTogetherDoNotDisturbEachOther) {
  forRandomGroups([&](std::mt19937_64& random, int size) {
    constexpr int kOperations = 40;
    Group group(size, GetParam());
    std::vector<std::vector<Data>> data(kOperations);  // [operation][rank]
    std::vector<Data> expected(kOperations);
    std::vector<int> kinds(kOperations);
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (int i = 0; i < kOperations; ++i) {
      kinds[i] = static_cast<int>(random() % 3);
      const std::size_t count = randomSize(random);
      for (int rank = 0; rank < size; ++rank) data[i].push_back(randomData(random, count));
      const int root = static_cast<int>(random() % static_cast<std::size_t>(size));
      expected[i] = data[i][root];
      if (kinds[i] == 1) {
        expected[i].assign(count, 0);
        for (const Data& part : data[i]) {
          for (std::size_t j = 0; j < count; ++j) expected[i][j] += part[j];
        }
      }
      for (int rank = 0; rank < size; ++rank) {
        Program program;
        const Topology topology = group[rank]->topology();
        if (kinds[i] == 0) broadcast(program, topology, root, sliceOf(data[i][rank]));
        if (kinds[i] == 1) allReduce(program, topology, kSum, sliceOf(data[i][rank]));
        if (kinds[i] == 2) barrier(program, topology);
        operations.push_back(TestOperation::launch(group[rank], std::move(program), static_cast<std::uint32_t>(i)));
      }
    }
    for (auto& operation : operations) {
      ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(60)));
      ASSERT_TRUE(operation->status()) << operation->status().toString();
    }
    for (int i = 0; i < kOperations; ++i) {
      for (int rank = 0; rank < size && kinds[i] < 2; ++rank) ASSERT_EQ(data[i][rank], expected[i]);
    }
  });
}

TEST(HostAlgorithms, RanksThatCallDifferentCollectivesAreToldWhoCalledWhat) {
  Group group(3, Group::kSharedMemory);
  std::vector<std::shared_ptr<TestOperation>> operations;
  std::vector<Data> data(3, Data(4, 1));
  for (int rank = 0; rank < 3; ++rank) {
    Program program;
    if (rank == 1) data[rank].resize(5);
    allReduce(program, group[rank]->topology(), kSum, sliceOf(data[rank]));
    operations.push_back(TestOperation::launch(group[rank], std::move(program), 1));
  }
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(operations[rank]->wait(transport::Clock::now() + std::chrono::seconds(10)));
    const std::string text = operations[rank]->status().toString();
    EXPECT_NE(text.find("all_reduce of 40 bytes"), std::string::npos) << text;
    EXPECT_NE(text.find("all_reduce of 32 bytes"), std::string::npos) << text;
  }
}

// A root of a small broadcast waits for nobody, and who is none for the root alone.
TEST(HostAlgorithms, RanksThatDoNotMeetAreToldByTheNextCollective) {
  for (const int size : {2, 3}) {
    Group group(size, Group::kSharedMemory);
    std::vector<Data> data(size, Data(4, 1));
    std::vector<std::string> texts(size);
    const auto run = [&](const auto& build) {
      std::vector<std::shared_ptr<TestOperation>> operations;
      for (int rank = 0; rank < size; ++rank) {
        Program program;
        build(program, rank);
        operations.push_back(TestOperation::launch(group[rank], std::move(program), 1));
      }
      for (auto& operation : operations) {
        ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(10)));
      }
      for (int rank = 0; rank < size; ++rank) texts[rank] = operations[rank]->status().toString();
    };
    run([&](Program& program, int rank) {
      broadcast(program, group[rank]->topology(), rank == size - 1 ? rank : 0, sliceOf(data[rank]));
    });
    run([&](Program& program, int rank) { broadcast(program, group[rank]->topology(), 0, sliceOf(data[rank])); });
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_NE(texts[rank].find("before this, "), std::string::npos) << texts[rank];
      EXPECT_NE(texts[rank].find("broadcast of 32 bytes with root 0"), std::string::npos) << texts[rank];
      EXPECT_NE(texts[rank].find("with root " + std::to_string(size - 1)), std::string::npos) << texts[rank];
    }
  }
}

TEST(HostAlgorithms, ARankThatGivesUpEndsTheWaitOfTheOthers) {
  Group group(2, Group::kSharedMemory);
  Data data[2] = {Data(100'000, 1), Data(100'000, 1)};
  Program program;
  allReduce(program, group[0]->topology(), kSum, sliceOf(data[0]));
  auto operation = TestOperation::launch(group[0], std::move(program), 1);
  EXPECT_FALSE(operation->wait(transport::Clock::now() + std::chrono::milliseconds(50)));
  group[1]->abort(Status::aborted("enough"));
  ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(10)));
  EXPECT_NE(operation->status().toString().find("rank 1"), std::string::npos) << operation->status().toString();
}

std::string nameOf(const ::testing::TestParamInfo<AlgorithmsTest::ParamType>& info) {
  if (info.param == Group::kSharedMemory) return "SharedMemory";
  if (info.param == Group::kUnreadable) return "SharedMemoryThatIsNotRead";
  return info.param == 0 ? "LoopbackRendezvous" : "LoopbackEager";
}

INSTANTIATE_TEST_SUITE_P(Every, AlgorithmsTest, ::testing::Values(0, 4096, Group::kSharedMemory, Group::kUnreadable),
                         nameOf);
INSTANTIATE_TEST_SUITE_P(Every, SharedMemoryAlgorithmsTest, ::testing::Values(Group::kSharedMemory, Group::kUnreadable),
                         nameOf);

}  // namespace
}  // namespace farandole::collective
