#include "ddp/tensor_exchange.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <random>

#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

using Splits = TensorExchange::Splits;

// Another number for each sender, receiver and tensor.
at::Tensor partOf(int from, int to, int tensor, int64_t rows, at::ScalarType type, bool isWide) {
  const std::vector<int64_t> sizes = isWide ? std::vector<int64_t>{rows, 3} : std::vector<int64_t>{rows};
  return at::full(sizes, 1 + (from * 4 + to) * 4 + tensor, at::TensorOptions(type));
}

TEST(TensorExchange, EachRankGetsThePartsThatAreForIt) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const std::vector<at::ScalarType> types = {at::kLong, at::kFloat, at::kChar, at::kBFloat16};
  for (int size = 1; size <= 4; ++size) {
    std::mt19937 random(seed + size);
    const int tensors = static_cast<int>(random() % 5);
    std::vector<std::vector<std::vector<int64_t>>> rows(tensors);  // by tensor, sender and receiver
    for (auto& ofTensor : rows) {
      ofTensor.assign(size, std::vector<int64_t>(size));
      for (auto& ofSender : ofTensor) {
        for (int64_t& count : ofSender) count = static_cast<int64_t>(random() % 5);
      }
    }
    runThreads(size, [&](ThreadRank& self) {
      std::vector<at::Tensor> sent, expected;
      Splits sentSplits, receivedSplits;
      for (int i = 0; i < tensors; ++i) {
        std::vector<at::Tensor> out, in;
        std::vector<int64_t> to, by;
        for (int rank = 0; rank < size; ++rank) {
          to.push_back(rows[i][self.rank][rank]);
          by.push_back(rows[i][rank][self.rank]);
          out.push_back(partOf(self.rank, rank, i, to.back(), types[i], i % 2 == 1));
          in.push_back(partOf(rank, self.rank, i, by.back(), types[i], i % 2 == 1));
        }
        sent.push_back(at::cat(out));
        expected.push_back(at::cat(in));
        sentSplits.push_back(to);
        receivedSplits.push_back(by);
      }
      TensorExchange exchange(self.group, std::make_shared<StagingMemory>(), sent, sentSplits);
      for (at::Tensor& tensor : sent) tensor.zero_();  // it has copies
      exchange.expect(receivedSplits);
      exchange.start();
      for (int again = 0; again < 2; ++again) {
        const std::vector<at::Tensor>& received = exchange.wait();
        ASSERT_EQ(received.size(), expected.size());
        for (int i = 0; i < tensors; ++i) {
          EXPECT_EQ(received[i].scalar_type(), types[i]);
          EXPECT_TRUE(at::equal(received[i], expected[i]));
        }
      }
    });
  }
}

TEST(TensorExchange, RefusesTensorsAndSplitsThatDoNotFitBeforeAnythingIsSent) {
  runThreads(2, [](ThreadRank& self) {
    const at::Tensor tensor = at::zeros({2, 2});
    const Splits one = {{1, 1}}, two = {{1, 1}, {1, 1}};
    const auto memory = std::make_shared<StagingMemory>();
    const auto refuse = [&](const std::vector<at::Tensor>& sent, const Splits& to) {
      EXPECT_THROW(TensorExchange(self.group, memory, sent, to), c10::Error);
    };
    refuse({tensor, tensor}, one);
    refuse({at::zeros({})}, one);
    refuse({at::zeros({2, 2}).t()}, one);
    refuse({at::zeros({2, 2}, at::kMeta)}, one);
    refuse({tensor}, {{1, 2}});
    refuse({tensor}, {{3, -1}});
    refuse({tensor}, {{2}});
    TensorExchange exchange(self.group, memory, {tensor}, one);
    EXPECT_THROW(exchange.start(), c10::Error);
    for (const Splits& by :
         {two, Splits{{1, -1}}, Splits{{1, 1, 0}}, self.rank == 0 ? Splits{{2, 1}} : Splits{{1, 2}}}) {
      EXPECT_THROW(exchange.expect(by), c10::Error);
    }
    exchange.expect(one);
    EXPECT_THROW(exchange.wait(), c10::Error);
    exchange.start();
    EXPECT_THROW(exchange.start(), c10::Error);
    EXPECT_THROW(exchange.expect(one), c10::Error);
    EXPECT_TRUE(at::equal(exchange.wait().at(0), tensor));
  });
}

TEST(TensorExchange, EndsWhenTheGroupIsAborted) {
  std::promise<void> started;
  runThreads(2, [&](ThreadRank& self) {
    if (self.rank == 1) {
      ASSERT_EQ(started.get_future().wait_for(std::chrono::seconds(10)), std::future_status::ready);
      return self.backend->abort();
    }
    TensorExchange exchange(self.group, std::make_shared<StagingMemory>(), {at::zeros({2})}, {{1, 1}});
    exchange.expect({{1, 1}});
    exchange.start();
    started.set_value();
    for (int again = 0; again < 2; ++again) EXPECT_THROW(exchange.wait(), c10::Error);
  });
}

}  // namespace
}  // namespace farandole::ddp
