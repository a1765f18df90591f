#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "tests/backend/collective/communicators.h"
#include "tests/backend/collective/slices.h"
#include "tests/backend/collective/sums.h"

namespace farandole::collective {
namespace {

using namespace std::chrono_literals;
using testing::Group;
using testing::sliceOf;
using testing::slicesOf;
using testing::TestOperation;
using Data = std::vector<std::byte>;
using Build = std::function<void(Program&, Topology)>;

// Bytes around all at which data goes another way, alone and together with that for other ranks.
std::size_t randomSize(std::mt19937_64& random) {
  constexpr std::size_t kSizes[] = {0,         0,       1,         63,      64,       65,       4000,
                                    8191,      8192,    32'767,    32'768,  65'535,   64 << 10, 65'537,
                                    256 << 10, 300'001, 512 << 10, 524'289, 1'000'000};
  return kSizes[random() % std::size(kSizes)];
}

Data randomData(std::mt19937_64& random, std::size_t bytes) {
  Data data(bytes);
  for (std::byte& x : data) x = static_cast<std::byte>(random());
  return data;
}

std::byte added(std::byte a, std::byte b) {
  return static_cast<std::byte>(std::to_integer<unsigned>(a) + std::to_integer<unsigned>(b));
}

constexpr Reduction kSumOfBytes = testing::kSumOf<std::uint8_t>;

// What one collective takes and gives, for all ranks. A reduction adds bytes.
struct Exchange {
  enum class Kind : std::uint8_t { kAllGather, kGather, kScatter, kAllToAll, kReduceScatter };
  Kind kind;
  int root;
  std::vector<std::vector<Data>> given;  // by rank; of what has one piece only, the first counts
  std::vector<std::vector<Data>> taken;
  std::vector<std::vector<Data>> expected;

  static Exchange draw(std::mt19937_64& random, int size) {
    Exchange e{
        static_cast<Kind>(random() % 5), static_cast<int>(random() % static_cast<std::size_t>(size)), {}, {}, {}};
    e.given.resize(size);
    std::vector<std::size_t> summed(size);  // bytes
    for (std::size_t& bytes : summed) bytes = randomSize(random);
    for (auto& pieces : e.given) {
      for (int to = 0; to < size; ++to) {
        pieces.push_back(randomData(random, e.kind == Kind::kReduceScatter ? summed[to] : randomSize(random)));
      }
    }
    e.expected.resize(size);
    for (int rank = 0; rank < size; ++rank) {
      if (e.kind == Kind::kReduceScatter) {
        Data& sum = e.expected[rank].emplace_back(summed[rank]);
        for (const auto& pieces : e.given) {
          for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = added(sum[i], pieces[rank][i]);
        }
      }
      for (int from = 0; from < size; ++from) {
        const bool takes = e.kind == Kind::kAllGather || e.kind == Kind::kAllToAll ||
                           (e.kind == Kind::kGather && rank == e.root) || (e.kind == Kind::kScatter && from == e.root);
        if (takes) e.expected[rank].push_back(e.given[from][e.hasPieces() ? rank : 0]);
      }
    }
    e.taken = e.expected;
    for (auto& pieces : e.taken) {
      for (Data& piece : pieces) std::ranges::fill(piece, std::byte{0xee});
    }
    return e;
  }
  bool hasPieces() const { return kind == Kind::kScatter || kind == Kind::kAllToAll; }

  void build(Program& program, Topology t) {
    const std::vector<Slice> inputs = slicesOf(given[t.rank]);
    const std::vector<Slice> outputs = slicesOf(taken[t.rank]);
    switch (kind) {
      case Kind::kAllGather: return allGather(program, t, inputs[0], outputs);
      case Kind::kGather: return gather(program, t, root, inputs[0], outputs);
      case Kind::kScatter: return scatter(program, t, root, outputs[0], inputs);
      case Kind::kAllToAll: return allToAll(program, t, outputs, inputs);
      case Kind::kReduceScatter: return reduceScatter(program, t, kSumOfBytes, outputs[0], inputs);
    }
  }
};

class HostExchangeTest : public ::testing::TestWithParam<std::size_t> {};

// Several in flight at once, some of them several in one program, so that slots and counters are used again.
TEST_P(HostExchangeTest, PiecesOfAllSizesArriveWhereTheyBelong) {
  const std::uint64_t first = std::random_device{}();
  for (std::uint64_t seed = first; seed < first + 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const int size = 2 + static_cast<int>(random() % 4);
    Group group(size, GetParam());
    EXPECT_EQ(group[0]->topology().segment->everybodyReads(), GetParam() != Group::kUnreadable);
    std::vector<Exchange> exchanges;
    exchanges.reserve(12);
    for (int i = 0; i < 12; ++i) exchanges.push_back(Exchange::draw(random, size));
    const std::size_t perProgram = 1 + random() % 3;
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (std::size_t i = 0; i < exchanges.size(); i += perProgram) {
      for (int rank = 0; rank < size; ++rank) {
        Program program;
        for (std::size_t j = i; j < std::min(i + perProgram, exchanges.size()); ++j) {
          exchanges[j].build(program, group[rank]->topology());
        }
        operations.push_back(TestOperation::launch(group[rank], std::move(program), static_cast<std::uint32_t>(i)));
      }
    }
    for (auto& operation : operations) {
      ASSERT_TRUE(operation->wait(transport::Clock::now() + 60s));
      ASSERT_TRUE(operation->status()) << operation->status().toString();
    }
    for (const Exchange& e : exchanges) ASSERT_TRUE(e.taken == e.expected) << "kind " << static_cast<int>(e.kind);
  }
}

// Runs one program on each rank; the errors.
std::vector<std::string> errorsOf(const Group& group, const Build& build) {
  std::vector<std::shared_ptr<TestOperation>> operations;
  for (int rank = 0; rank < group.size(); ++rank) {
    Program program;
    build(program, group[rank]->topology());
    operations.push_back(TestOperation::launch(group[rank], std::move(program), 1));
  }
  std::vector<std::string> errors;
  for (auto& operation : operations) {
    EXPECT_TRUE(operation->wait(transport::Clock::now() + 10s));
    errors.push_back(operation->isDone() ? operation->status().toString() : "not done");
  }
  return errors;
}

// Through the windows in many pieces, and past the caches; one rank may have more than the other.
TEST_P(HostExchangeTest, LongPartsOfTwoRanksArriveWhereTheyBelong) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  Group group(2, GetParam());
  for (const std::size_t longest : {std::size_t{8} << 20, std::size_t{9'000'001}}) {
    for (const std::size_t other : {std::size_t{0}, std::size_t{1'000'003}, longest}) {
      const std::size_t bytes[2] = {longest, other};
      std::vector<Data> inputs[2];
      std::vector<Data> outputs[2];
      for (int rank = 0; rank < 2; ++rank) {
        for (int to = 0; to < 2; ++to) inputs[rank].push_back(randomData(random, bytes[(rank + to) % 2]));
      }
      for (int rank = 0; rank < 2; ++rank) {
        for (int from = 0; from < 2; ++from) outputs[rank].emplace_back(inputs[from][rank].size());
      }
      const auto errors = errorsOf(
          group, [&](Program& p, Topology t) { allToAll(p, t, slicesOf(outputs[t.rank]), slicesOf(inputs[t.rank])); });
      for (const std::string& error : errors) ASSERT_EQ(error, "ok");
      for (int rank = 0; rank < 2; ++rank) {
        for (int from = 0; from < 2; ++from) ASSERT_TRUE(outputs[rank][from] == inputs[from][rank]);
      }
    }
  }
}

TEST_P(HostExchangeTest, APieceOfAnotherSizeThanExpectedIsAnErrorThatNamesBothSizes) {
  const auto check = [](std::size_t sent, std::size_t wanted, std::size_t back) {
    SCOPED_TRACE(std::to_string(sent) + " for " + std::to_string(wanted) + ", back " + std::to_string(back));
    // What a transport may still be sending after an early end must outlive it.
    std::vector<std::vector<Data>> inputs(2, std::vector<Data>(2, Data(back)));
    std::vector<std::vector<Data>> outputs = inputs;
    Group group(2, GetParam());
    inputs[0][1].resize(sent);
    outputs[1][0].resize(wanted);
    const auto errors = errorsOf(
        group, [&](Program& p, Topology t) { allToAll(p, t, slicesOf(outputs[t.rank]), slicesOf(inputs[t.rank])); });
    const std::string theirs = std::to_string(sent) + " bytes";
    const std::string ours = std::to_string(wanted);
    EXPECT_NE(errors[1].find("rank 0 (host host, pid 0) sent " + theirs), std::string::npos) << errors[1];
    EXPECT_NE(errors[1].find("the buffer here has " + ours), std::string::npos) << errors[1];
    EXPECT_NE(errors[0].find(theirs), std::string::npos) << errors[0];
    EXPECT_NE(errors[0].find(ours), std::string::npos) << errors[0];
  };
  for (const std::size_t sent : {8, 20'000, 600'000}) {
    for (const std::size_t wanted : {30, 100, 700'000}) {
      for (const std::size_t back : {50'000, 600'000}) check(sent, wanted, back);
    }
  }
}

// Their sum and the longer one are the same on both ranks.
TEST_P(HostExchangeTest, RanksThatMeanTheOppositeSizesInAnAllGatherAreTold) {
  for (const std::size_t longer : {std::size_t{50'000}, std::size_t{300'000}}) {
    SCOPED_TRACE(longer);
    const std::size_t sizes[2] = {longer, 1'000};
    std::vector<Data> inputs(2, Data(longer));  // each means that it has the longer one
    std::vector<std::vector<Data>> outputs(2);
    for (int rank = 0; rank < 2; ++rank) {
      for (int from = 0; from < 2; ++from) outputs[rank].emplace_back(sizes[(rank + from) % 2]);
    }
    Group group(2, GetParam());
    const auto errors = errorsOf(
        group, [&](Program& p, Topology t) { allGather(p, t, sliceOf(inputs[t.rank]), slicesOf(outputs[t.rank])); });
    for (int rank = 0; rank < 2; ++rank) {
      const std::string said = "sent " + std::to_string(longer) + " bytes, the buffer here has 1000";
      EXPECT_NE(errors[rank].find(said), std::string::npos) << errors[rank];
    }
  }
}

TEST_P(HostExchangeTest, RanksThatCallDifferentCollectivesAreToldWhoCalledWhat) {
  struct Case {
    Build builds[2];
    const char* calls[2];
  };
  Data data(100'000);
  std::vector<Data> pieces(2, Data(100'000));
  std::vector<Data> few(2, Data(100));
  const std::vector<Slice> shortSlices = slicesOf(few);
  const std::vector<Slice> slices = slicesOf(pieces);
  const auto gatherTo = [&](int root) {
    return [&, root](Program& p, Topology t) { gather(p, t, root, sliceOf(data), slices); };
  };
  const auto scatterFrom = [&](int root) {
    return [&, root](Program& p, Topology t) { scatter(p, t, root, sliceOf(data), slices); };
  };
  const Build all = [&](Program& p, Topology t) { allToAll(p, t, slices, slices); };
  const Build gatherAll = [&](Program& p, Topology t) { allGather(p, t, sliceOf(data), slices); };
  const Build allOfFew = [&](Program& p, Topology t) { allToAll(p, t, shortSlices, shortSlices); };
  const Build gatherAllOfFew = [&](Program& p, Topology t) { allGather(p, t, shortSlices[0], shortSlices); };
  const Case cases[] = {
      {{all, gatherAll}, {"all_to_all", "all_gather of 200000 bytes"}},
      {{allOfFew, gatherAll}, {"all_to_all", "all_gather of 200000 bytes"}},
      {{gatherAllOfFew, all}, {"all_gather of 200 bytes", "all_to_all"}},
      {{gatherTo(0), gatherTo(1)}, {"gather with root 0", "gather with root 1"}},
      {{gatherTo(1), gatherTo(0)}, {"gather with root 1", "gather with root 0"}},
      {{scatterFrom(0), scatterFrom(1)}, {"scatter with root 0", "scatter with root 1"}},
      {{scatterFrom(1), scatterFrom(0)}, {"scatter with root 1", "scatter with root 0"}},
      {{scatterFrom(0), all}, {"scatter with root 0", "all_to_all"}},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.calls[0] + std::string(" and ") + one.calls[1]);
    Group group(2, GetParam());
    const auto errors = errorsOf(group, [&](Program& p, Topology t) { one.builds[t.rank](p, t); });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("rank 0"), std::string::npos) << error;
      for (const char* call : one.calls) EXPECT_NE(error.find(call), std::string::npos) << error;
    }
  }
}

// Its memory is used for something else by then.
TEST_P(HostExchangeTest, NothingIsTakenFromARankThatHasGivenUp) {
  Data data[2] = {Data(3'000'000, std::byte{1}), Data(3'000'000, std::byte{1})};
  std::vector<Data> outputs[2] = {std::vector<Data>(2, Data(3'000'000)), std::vector<Data>(2, Data(3'000'000))};
  Group group(2, GetParam());
  const auto launch = [&](int rank) {
    Program program;
    allGather(program, group[rank]->topology(), sliceOf(data[rank]), slicesOf(outputs[rank]));
    return TestOperation::launch(group[rank], std::move(program), 1);
  };
  const auto first = launch(0);
  EXPECT_FALSE(first->wait(transport::Clock::now() + 20ms));
  group[0]->timeOut(*first, 20ms);
  ASSERT_TRUE(first->isDone());
  std::ranges::fill(data[0], std::byte{2});
  const auto second = launch(1);
  ASSERT_TRUE(second->wait(transport::Clock::now() + 10s));
  const std::string text = second->status().toString();
  EXPECT_NE(text.find("rank 0 (host host, pid 0) has left or given up the group"), std::string::npos) << text;
  EXPECT_NE(text.find("not done after its timeout of 20 ms"), std::string::npos) << text;
}

TEST_P(HostExchangeTest, AnAllGatherMayHaveItsInputWhereItsOwnPartGoes) {
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{20'000}, std::size_t{64} << 10, std::size_t{500'000}, std::size_t{9'000'001}}) {
    SCOPED_TRACE(std::to_string(bytes) + " bytes");
    Group group(2, GetParam());
    std::mt19937_64 random(bytes);
    const std::vector<Data> given = {randomData(random, bytes), randomData(random, bytes)};
    std::vector<std::vector<Data>> taken(2, {Data(bytes), Data(bytes)});
    for (int rank = 0; rank < 2; ++rank) taken[rank][rank] = given[rank];
    const auto errors = errorsOf(group, [&](Program& p, Topology t) {
      allGather(p, t, sliceOf(taken[t.rank][t.rank]), slicesOf(taken[t.rank]));
    });
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(errors[rank], "ok");
      EXPECT_TRUE(taken[rank] == given);
    }
  }
}

TEST_P(HostExchangeTest, AReduceScatterMayPutItsResultIntoItsOwnInput) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{8192}, std::size_t{8193}, std::size_t{64} << 10,
                                  (std::size_t{64} << 10) + 1, std::size_t{500'000}}) {
    SCOPED_TRACE(std::to_string(bytes) + " bytes");
    Group group(2, GetParam());
    std::mt19937_64 random(bytes);
    std::vector<std::vector<Data>> pieces(2);
    for (auto& list : pieces) list = {randomData(random, bytes), randomData(random, bytes)};
    const std::vector<std::vector<Data>> inputs = pieces;
    const auto errors = errorsOf(group, [&](Program& p, Topology t) {
      reduceScatter(p, t, kSumOfBytes, sliceOf(pieces[t.rank][t.rank]), slicesOf(pieces[t.rank]));
    });
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(errors[rank], "ok");
      Data expected(bytes);
      const void* const parts[2] = {inputs[0][rank].data(), inputs[1][rank].data()};
      kSumOfBytes.function(expected.data(), parts, 2, bytes);
      EXPECT_TRUE(pieces[rank][rank] == expected);
      EXPECT_TRUE(pieces[rank][1 - rank] == inputs[rank][1 - rank]);
    }
  }
}

TEST_P(HostExchangeTest, RanksThatSplitTheSameBytesInOtherWaysAreTold) {
  std::vector<std::vector<Data>> pieces = {{Data(60'000), Data(70'000)}, {Data(65'000), Data(65'000)}};
  Group group(2, GetParam());
  const auto errors = errorsOf(group, [&](Program& p, Topology t) {
    reduceScatter(p, t, kSumOfBytes, sliceOf(pieces[t.rank][t.rank]), slicesOf(pieces[t.rank]));
  });
  for (const std::string& error : errors) {
    for (const char* call : {"in parts of up to 70000", "in parts of up to 65000"}) {
      EXPECT_NE(error.find(call), std::string::npos) << error;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, HostExchangeTest,
                         ::testing::Values(Group::kSharedMemory, Group::kUnreadable, Group::kReading),
                         [](const auto& info) {
                           if (info.param == Group::kReading) return std::string("ReadByTwo");
                           return std::string(info.param == Group::kSharedMemory ? "Read" : "NotRead");
                         });

}  // namespace
}  // namespace farandole::collective
