#include "ddp/flat_buffer.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace farandole::ddp {
namespace {

TEST(FlatBuffer, StartsAtZeroAndGradientsAliasTheirRange) {
  FlatBuffer buffer(256, at::kDouble);
  const at::Tensor param = at::empty({3, 5}, at::kDouble);
  const at::Tensor grad = buffer.like(param, 64);
  const at::Tensor range = buffer.range(64, 128);
  EXPECT_EQ(range.abs().sum().item<double>(), 0);
  grad.copy_(at::arange(15, at::kDouble).view({3, 5}));
  EXPECT_TRUE(range.slice(0, 0, 15).equal(at::arange(15, at::kDouble)));
  EXPECT_EQ(buffer.range(0, 64).abs().sum().item<double>(), 0);
  buffer.zero();
  EXPECT_EQ(grad.abs().sum().item<double>(), 0);
}

TEST(FlatBuffer, WhatNobodyHasWrittenToTakesNoMemory) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  FlatBuffer buffer(16 << 20, at::kFloat);
  buffer.range(8 << 20, (8 << 20) + 1).fill_(1);
  const auto start = reinterpret_cast<std::uintptr_t>(buffer.range(0, 16 << 20).const_data_ptr()) / page * page;
  std::vector<unsigned char> pages((std::size_t{64} << 20) / page);
  ASSERT_EQ(mincore(reinterpret_cast<void*>(start), pages.size() * page, pages.data()), 0);
  const auto resident = std::ranges::count_if(pages, [](unsigned char bits) { return (bits & 1) != 0; });
  EXPECT_GE(resident, 1);
  // What is written to may be in a huge page; the ends may share theirs with others.
  EXPECT_LE(static_cast<std::size_t>(resident) * page, std::size_t{8} << 20);
}

TEST(FlatBuffer, GradientsHaveTheStridesOfDenseParametersAndAreContiguousForOthers) {
  FlatBuffer buffer(4096, at::kFloat);
  const at::Tensor channelsLast = at::empty({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_EQ(buffer.like(channelsLast, 0).strides(), channelsLast.strides());
  const at::Tensor sparseStrides = at::empty({8, 8}).slice(1, 0, 8, 2);
  EXPECT_EQ(buffer.like(sparseStrides, 0).sizes(), sparseStrides.sizes());
  EXPECT_TRUE(buffer.like(sparseStrides, 0).is_contiguous());
}

TEST(FlatBuffer, ChangingOneGradientDoesNotCountAsChangingAnother) {
  FlatBuffer buffer(128, at::kFloat);
  const at::Tensor first = buffer.like(at::empty({4}), 0);
  const at::Tensor second = buffer.like(at::empty({4}), 64);
  const auto version = second._version();
  first.add_(1);
  EXPECT_EQ(second._version(), version);
  EXPECT_FALSE(first.is_view());
}

}  // namespace
}  // namespace farandole::ddp
