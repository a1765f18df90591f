#include "pipeline/runtime/shape_exchange.h"

#include <gtest/gtest.h>

#include <random>

#include "pipeline/runtime/packet.h"

namespace farandole::pipeline {
namespace {

TEST(ShapeExchange, HeadersRoundTripForRandomTensors) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  const at::ScalarType dtypes[] = {at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kBool, at::kComplexDouble};
  for (int round = 0; round < 200; ++round) {
    std::vector<TensorMeta> metas(rng() % 20);
    for (TensorMeta& meta : metas) {
      meta.dtype = dtypes[rng() % std::size(dtypes)];
      meta.requiresGrad = rng() % 2 == 0;
      for (std::uint64_t dims = rng() % 6; dims > 0; --dims) meta.sizes.push_back(rng() % 1000);
    }
    if (rng() % 3 == 0) metas.push_back({{kPacketBlock}, at::kByte, false, true});
    const Result<at::Tensor> header = encodeHeader(metas);
    ASSERT_TRUE(header) << header.status().toString();
    const auto decoded = decodeHeader(header.value());
    ASSERT_TRUE(decoded && decoded.value().has_value());
    EXPECT_EQ(*decoded.value(), metas);
  }
}

TEST(ShapeExchange, PoisonIsToldFromNoTensors) {
  EXPECT_FALSE(decodeHeader(poisonedHeader()).value().has_value());
  EXPECT_TRUE(decodeHeader(encodeHeader({}).value()).value().has_value());
}

TEST(ShapeExchange, APacketIsTheLastTensorAndOneOfBytes) {
  const TensorMeta packet{{kPacketBlock}, at::kByte, false, true}, tensor{{3}, at::kFloat, true};
  EXPECT_TRUE(decodeHeader(*encodeHeader({tensor, packet})));
  EXPECT_FALSE(decodeHeader(*encodeHeader({packet, tensor})));
  EXPECT_FALSE(decodeHeader(*encodeHeader({{{3}, at::kFloat, false, true}})));
  EXPECT_FALSE(decodeHeader(*encodeHeader({{{2, 3}, at::kByte, false, true}})));
  EXPECT_TRUE(checkDeclared("inputs", {tensor}, {tensor, packet}).isOk());
}

TEST(ShapeExchange, RefusesWhatDoesNotFitAHeader) {
  EXPECT_FALSE(encodeHeader(std::vector<TensorMeta>(65)));
  EXPECT_FALSE(encodeHeader({{std::vector<std::int64_t>(253, 1), at::kFloat, false}}));
  EXPECT_TRUE(encodeHeader({{std::vector<std::int64_t>(252, 1), at::kFloat, false}}));
}

TEST(ShapeExchange, RandomContentsAreAnErrorOrShapesAndNeverACrash) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  for (int round = 0; round < 2000; ++round) {
    at::Tensor header = emptyHeader();
    std::int64_t* data = header.data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < kHeaderLength; ++i) {
      data[i] = rng() % 8 == 0 ? static_cast<std::int64_t>(rng()) : static_cast<std::int64_t>(rng() % 70) - 2;
    }
    const auto decoded = decodeHeader(header);
    if (decoded && decoded.value()) {
      EXPECT_LE(decoded.value()->size(), 64u);
    }
  }
}

TEST(ShapeExchange, ADeclarationThatDoesNotHoldNamesBothLists) {
  const std::vector<TensorMeta> declared{{{2, 3}, at::kFloat, false}};
  EXPECT_TRUE(checkDeclared("inputs", declared, {{{2, 3}, at::kFloat, true}}).isOk());
  const std::string text = checkDeclared("inputs", declared, {{{2, 3}, at::kDouble, false}}).toString();
  for (const char* part : {"the inputs are", "(float64[2, 3])", "(float32[2, 3])"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace farandole::pipeline
