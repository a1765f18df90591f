#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "tests/backend/transport/nccl/simulator/reductions.h"
#include "tests/backend/transport/nccl/simulator/simulated_ranks.h"

namespace farandole::testing {
namespace {

constexpr int kRanks = 4;

// Random collectives and exchanges of one cluster over several streams of each rank, with what each must leave behind.
class RandomProgram {
 public:
  explicit RandomProgram(std::uint64_t seed) : seed_(seed), ranks_(kRanks, seed) {
    ranks_.join();
    std::mt19937_64 random(seed);
    for (int i = 0; i < kSteps; ++i) {
      steps_.push_back({static_cast<int>(random() % 5), static_cast<int>(random() % kRanks), 1 + random() % 9});
    }
  }

  // Each rank fills its input on one stream, communicates on another and takes the result on a third; `waits`: events
  // say so. The number of wrong elements.
  int wrong(bool waits) {
    std::atomic<int> wrong{0};
    ranks_.each([&](int rank) { run(rank, waits, wrong); });
    EXPECT_TRUE(ranks_.cluster.violations().empty()) << ranks_.cluster.violations()[0];
    return wrong;
  }

 private:
  static constexpr int kSteps = 40;
  using Values = std::vector<std::int32_t>;
  struct Step {
    int kind, root;
    std::size_t count;
  };

  // What `rank` has at `i` before `step`.
  std::int32_t input(int step, int rank, std::size_t i) const {
    return static_cast<std::int32_t>(seed_ % 100) + step * 1000 + rank * 100 + static_cast<std::int32_t>(i);
  }
  Values expected(int step, int rank) const;
  void issue(int rank, const Step& step, Values& in, Values& out, cudaStream_t stream);
  void run(int rank, bool waits, std::atomic<int>& wrong);

  const std::uint64_t seed_;
  SimulatedRanks ranks_;
  std::vector<Step> steps_;
};

RandomProgram::Values RandomProgram::expected(int step, int rank) const {
  const auto& [kind, root, count] = steps_[static_cast<std::size_t>(step)];
  Values out(count * kRanks, -1);
  for (std::size_t i = 0; i < count; ++i) {
    std::int32_t sum = 0, scattered = 0;
    for (int from = 0; from < kRanks; ++from) {
      const std::size_t mine = static_cast<std::size_t>(rank) * count + i;
      const std::size_t theirs = static_cast<std::size_t>(from) * count + i;
      sum += input(step, from, i);
      scattered += input(step, from, mine);
      if (kind == 1) out[theirs] = input(step, from, i);
      if (kind == 2) out[theirs] = input(step, from, mine);
    }
    if (kind == 0) out[i] = sum;
    if (kind == 3) out[i] = scattered;
    if (kind == 4) out[i] = input(step, root, i);
  }
  return out;
}

void RandomProgram::issue(int rank, const Step& step, Values& in, Values& out, cudaStream_t stream) {
  const transport::NcclApi& nccl = ranks_.nccl;
  const ncclComm_t comm = ranks_.comm(rank);
  const auto& [kind, root, count] = step;
  if (kind == 0) {
    EXPECT_EQ(nccl.allReduce(in.data(), out.data(), count, ncclInt32, ncclSum, comm, stream), ncclSuccess);
  }
  if (kind == 1) {
    EXPECT_EQ(nccl.allGather(in.data(), out.data(), count, ncclInt32, comm, stream), ncclSuccess);
  }
  if (kind == 3) {
    EXPECT_EQ(nccl.reduceScatter(in.data(), out.data(), count, ncclInt32, ncclSum, comm, stream), ncclSuccess);
  }
  if (kind == 4) {
    EXPECT_EQ(nccl.broadcast(in.data(), out.data(), count, ncclInt32, root, comm, stream), ncclSuccess);
  }
  if (kind != 2) return;
  EXPECT_EQ(nccl.groupStart(), ncclSuccess);
  for (int i = 0; i < kRanks; ++i) {
    const int peer = (rank + i) % kRanks;
    const std::size_t at = static_cast<std::size_t>(peer) * count;
    EXPECT_EQ(nccl.send(in.data() + at, count, ncclInt32, peer, comm, stream), ncclSuccess);
    EXPECT_EQ(nccl.recv(out.data() + at, count, ncclInt32, peer, comm, stream), ncclSuccess);
  }
  EXPECT_EQ(nccl.groupEnd(), ncclSuccess);
}

void RandomProgram::run(int rank, bool waits, std::atomic<int>& wrong) {
  SimulatedCluster& cluster = ranks_.cluster;
  const transport::CudaApi& cuda = ranks_.cuda;
  std::mt19937_64 random(seed_ * kRanks + static_cast<std::uint64_t>(rank));
  std::vector<cudaStream_t> streams(4);
  for (cudaStream_t& stream : streams) EXPECT_EQ(cuda.streamCreate(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cuda.eventCreate(&event, cudaEventDisableTiming), cudaSuccess);
  const auto order = [&](cudaStream_t before, cudaStream_t after) {
    if (!waits) return;
    EXPECT_EQ(cuda.eventRecord(event, before), cudaSuccess);
    EXPECT_EQ(cuda.streamWaitEvent(after, event, 0), cudaSuccess);
  };
  std::vector<Values> ins(kSteps), outs(kSteps);
  for (int step = 0; step < kSteps; ++step) {
    Values& in = ins[static_cast<std::size_t>(step)];
    Values& out = outs[static_cast<std::size_t>(step)];
    const std::size_t total = steps_[static_cast<std::size_t>(step)].count * kRanks;
    in.assign(total, 0);
    out.assign(total, -1);
    const cudaStream_t fills = streams[random() % 4], moves = streams[random() % 4], takes = streams[random() % 4];
    cluster.enqueue(fills, [this, &in, step, rank] {
      for (std::size_t i = 0; i < in.size(); ++i) in[i] = input(step, rank, i);
    });
    order(fills, moves);
    issue(rank, steps_[static_cast<std::size_t>(step)], in, out, moves);
    order(moves, takes);
    cluster.enqueue(takes, [this, &out, &wrong, step, rank] {
      const Values right = expected(step, rank);
      for (std::size_t i = 0; i < right.size(); ++i) wrong += right[i] != out[i];
    });
  }
  for (const cudaStream_t stream : streams) {
    EXPECT_TRUE(cluster.synchronize(stream, 30s)) << "seed " << seed_;
    EXPECT_EQ(cuda.streamDestroy(stream), cudaSuccess);
  }
  EXPECT_EQ(cuda.eventDestroy(event), cudaSuccess);
  EXPECT_EQ(ranks_.nccl.commDestroy(ranks_.comm(rank)), ncclSuccess);
}

TEST(Simulator, RandomProgramsOverSeveralStreamsLeaveTheRightData) {
  for (int i = 0; i < 20; ++i) {
    const std::uint64_t seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    ASSERT_EQ(RandomProgram(seed).wrong(true), 0);
  }
}

TEST(Simulator, AMissingWaitLeavesWrongData) {
  int seen = 0;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) seen += RandomProgram(seed).wrong(false) > 0;
  EXPECT_EQ(seen, 5);
}

template <typename T>
Bytes bytesOf(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

TEST(Simulator, ReducesEveryOperation) {
  const std::vector<Bytes> parts = {bytesOf<std::int64_t>({3, -4}), bytesOf<std::int64_t>({5, 7})};
  const auto with = [&](ncclRedOp_t op) { return reduce(parts, {2, Operator{op, nullptr, nullptr}}, ncclInt64); };
  EXPECT_EQ(with(ncclSum), bytesOf<std::int64_t>({8, 3}));
  EXPECT_EQ(with(ncclProd), bytesOf<std::int64_t>({15, -28}));
  EXPECT_EQ(with(ncclMax), bytesOf<std::int64_t>({5, 7}));
  EXPECT_EQ(with(ncclMin), bytesOf<std::int64_t>({3, -4}));
  EXPECT_EQ(with(ncclAvg), bytesOf<std::int64_t>({4, 1}));
}

TEST(Simulator, HalfAndBfloat16RoundToTheNearestAndComeBackExactly) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float asHalf = halfToFloat(half), asBfloat16 = bfloat16ToFloat(half);
    ASSERT_TRUE(std::isnan(asHalf) || halfFromFloat(asHalf) == half) << bits;
    ASSERT_TRUE(std::isnan(asBfloat16) || bfloat16FromFloat(asBfloat16) == half) << bits;
  }
  EXPECT_EQ(halfFromFloat(1.0F), 0x3c00);
  EXPECT_EQ(halfFromFloat(65504.0F), 0x7bff);
  EXPECT_EQ(halfFromFloat(65520.0F), 0x7c00);
  EXPECT_EQ(halfFromFloat(1.0F + 0x1p-11F), 0x3c00);  // a tie, to even
  EXPECT_EQ(halfFromFloat(1.0F + 0x3p-11F), 0x3c02);
  EXPECT_EQ(halfFromFloat(0x1p-25F), 0);
  EXPECT_EQ(halfFromFloat(0x1.8p-25F), 1);
  EXPECT_EQ(bfloat16FromFloat(1.0F), 0x3f80);
  EXPECT_EQ(bfloat16FromFloat(1.0F + 0x1p-8F), 0x3f80);
  EXPECT_EQ(bfloat16FromFloat(1.0F + 0x3p-8F), 0x3f82);
  const Bytes sum =
      reduce({bytesOf<std::uint16_t>({0x3c00}), bytesOf<std::uint16_t>({0x4000})}, {2, Operator{}}, ncclFloat16);
  EXPECT_EQ(sum, bytesOf<std::uint16_t>({0x4200}));  // 1 + 2
}

TEST(Simulator, APreMultipliedSumTakesEachRanksFactor) {
  SimulatedRanks ranks(2);
  ranks.join();
  std::vector<float> values = {10, 20};
  ranks.each([&](int rank) {
    float factor = rank == 0 ? 0.5F : 3.0F;
    ncclRedOp_t op = ncclSum;
    ASSERT_EQ(ranks.nccl.redOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, ranks.comm(rank)),
              ncclSuccess);
    factor = 0;
    float* const value = &values[static_cast<std::size_t>(rank)];
    EXPECT_EQ(ranks.nccl.allReduce(value, value, 1, ncclFloat32, op, ranks.comm(rank), ranks.stream(rank)),
              ncclSuccess);
    EXPECT_EQ(ranks.nccl.redOpDestroy(op, ranks.comm(rank)), ncclSuccess);
    EXPECT_EQ(ranks.nccl.redOpDestroy(op, ranks.comm(rank)), ncclInvalidArgument);
    EXPECT_TRUE(ranks.synchronize(rank));
  });
  EXPECT_EQ(values, (std::vector<float>{65, 65}));
  EXPECT_TRUE(ranks.violated("ncclRedOpDestroy"));
}

}  // namespace
}  // namespace farandole::testing
