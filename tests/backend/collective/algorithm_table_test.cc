#include "backend/collective/algorithm_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace farandole::collective {
namespace {

std::string errorOf(std::string_view text) {
  const auto table = AlgorithmTable::withOverrides(text);
  return table ? "" : table.status().toString();
}

TEST(AlgorithmTable, SomeRuleFitsEverySituation) {
  const AlgorithmTable table;
  for (const CollectiveKind kind :
       {CollectiveKind::kAllReduce, CollectiveKind::kReduce, CollectiveKind::kBroadcast, CollectiveKind::kAllGather,
        CollectiveKind::kReduceScatter, CollectiveKind::kBarrier}) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{4096}, ~std::size_t{0}}) {
      for (const int hosts : {2, 3, 17, 1000}) {
        EXPECT_EQ(table.choose(kind, {bytes, 2 * hosts, hosts, 2}), Algorithm::kHierarchical);
        // Else a hierarchical collective would ask for itself between the hosts.
        EXPECT_NE(table.choose(kind, {bytes, hosts, hosts, 1}), Algorithm::kHierarchical);
      }
    }
  }
}

constexpr auto kAllKinds = {CollectiveKind::kAllReduce,     CollectiveKind::kReduce,   CollectiveKind::kBroadcast,
                            CollectiveKind::kAllGather,     CollectiveKind::kGather,   CollectiveKind::kScatter,
                            CollectiveKind::kReduceScatter, CollectiveKind::kAllToAll, CollectiveKind::kBarrier};
constexpr auto kOnHost = {Algorithm::kSlots, Algorithm::kWindows, Algorithm::kMemory, Algorithm::kMessages,
                          Algorithm::kMeasured};

bool isOnHost(Algorithm algorithm) { return std::ranges::count(kOnHost, algorithm) > 0; }

// Whether this algorithm has a form for so many ranks that share memory.
bool exists(CollectiveKind kind, Algorithm algorithm, int ranks) {
  using enum CollectiveKind;
  const bool reduces = kind == kAllReduce || kind == kReduce || kind == kReduceScatter;
  const bool isForAll = kind == kAllGather || kind == kAllToAll;
  switch (algorithm) {
    case Algorithm::kSlots:
      return kind == kAllReduce || kind == kReduce || kind == kBroadcast ||
             (ranks == 2 && (kind == kReduceScatter || isForAll));
    case Algorithm::kWindows: return reduces || (ranks == 2 && isForAll);
    case Algorithm::kMemory: return isForAll || kind == kGather || kind == kScatter;
    case Algorithm::kMessages: return isForAll || kind == kGather || kind == kScatter || kind == kBroadcast;
    case Algorithm::kMeasured: return ranks == 2 && isForAll;
    default: return false;
  }
}

TEST(AlgorithmTable, RanksThatShareMemoryUseItWhateverIsSet) {
  for (const CollectiveKind kind : kAllKinds) {
    if (kind == CollectiveKind::kBarrier) continue;  // has no choice there
    std::vector<std::string> texts = {""};
    for (const auto* algorithm :
         {"slots", "windows", "memory", "messages", "measured", "flat", "ring", "direct", "hierarchical"}) {
      texts.push_back(std::string(toString(kind)) + "=" + algorithm);
    }
    for (const std::string& text : texts) {
      const auto table = AlgorithmTable::withOverrides(text);
      if (!table) continue;
      for (const int ranks : {2, 3, 4, 64}) {
        for (const std::size_t bytes : {std::size_t{0}, std::size_t{4096}, std::size_t{1} << 20, ~std::size_t{0}}) {
          const Algorithm chosen = table->choose(kind, {bytes, ranks, 1, ranks});
          EXPECT_TRUE(exists(kind, chosen, ranks)) << text << ", " << ranks << " ranks: " << toString(chosen);
        }
      }
    }
  }
}

TEST(AlgorithmTable, AnAlgorithmOnAHostIsRefusedWhereThereIsNoneAndElseUsedThereOnly) {
  for (const CollectiveKind kind : kAllKinds) {
    for (const Algorithm algorithm : kOnHost) {
      const std::string text = std::string(toString(kind)) + "=" + std::string(toString(algorithm));
      const auto table = AlgorithmTable::withOverrides(text);
      ASSERT_EQ(static_cast<bool>(table), exists(kind, algorithm, 2)) << text;
      if (!table) continue;
      EXPECT_EQ(table->choose(kind, {4096, 2, 1, 2}), algorithm) << text;
      if (exists(kind, algorithm, 5)) {
        EXPECT_EQ(table->choose(kind, {4096, 5, 1, 5}), algorithm) << text;
      }
      if (AlgorithmTable::withOverrides(std::string(toString(kind)) + "=hierarchical")) {
        EXPECT_FALSE(isOnHost(table->choose(kind, {4096, 4, 2, 2}))) << text;
        EXPECT_FALSE(isOnHost(table->choose(kind, {4096, 2, 2, 1}))) << text;
      }
    }
  }
}

TEST(AlgorithmTable, AnOverrideCountsInItsRangeOnly) {
  const auto table = AlgorithmTable::withOverrides("all_reduce:64K-512K=ring,broadcast:-4096=chain").value();
  const auto allReduce = [&](std::size_t bytes) { return table.choose(CollectiveKind::kAllReduce, {bytes, 2, 2, 1}); };
  EXPECT_EQ(allReduce((64 << 10) - 1), Algorithm::kFlat);
  EXPECT_EQ(allReduce(64 << 10), Algorithm::kRing);
  EXPECT_EQ(allReduce(512 << 10), Algorithm::kRing);
  EXPECT_EQ(allReduce((512 << 10) + 1), Algorithm::kRabenseifner);
  EXPECT_EQ(table.choose(CollectiveKind::kBroadcast, {4096, 2, 2, 1}), Algorithm::kChain);
  EXPECT_EQ(table.choose(CollectiveKind::kBroadcast, {4097, 2, 2, 1}), Algorithm::kBinomial);
}

TEST(AlgorithmTable, TwoRanksThatSwapMuchMeasureUnlessSomethingElseIsSet) {
  const AlgorithmTable plain;
  const AlgorithmTable overridden = AlgorithmTable::withOverrides("all_gather=windows,all_to_all=windows").value();
  for (const CollectiveKind kind : kAllKinds) {
    if (kind == CollectiveKind::kBarrier) continue;
    const bool isSwap = kind == CollectiveKind::kAllGather || kind == CollectiveKind::kAllToAll;
    for (const std::size_t bytes : {2 * kSmallestRead, std::size_t{1} << 20, std::size_t{1} << 30}) {
      EXPECT_EQ(plain.choose(kind, {bytes, 2, 1, 2}) == Algorithm::kMeasured, isSwap) << toString(kind);
      EXPECT_NE(plain.choose(kind, {bytes, 3, 1, 3}), Algorithm::kMeasured) << toString(kind);
    }
    if (!isSwap) continue;
    EXPECT_EQ(plain.choose(kind, {kSmallestRead - 1, 2, 1, 2}), Algorithm::kSlots);
    EXPECT_EQ(overridden.choose(kind, {1 << 20, 2, 1, 2}), Algorithm::kWindows);
  }
}

TEST(AlgorithmTable, WhatFollowsHierarchicalIsForBetweenTheHosts) {
  const auto table = AlgorithmTable::withOverrides("all_reduce=hierarchical/rabenseifner").value();
  EXPECT_EQ(table.choose(CollectiveKind::kAllReduce, {8, 4, 2, 2}), Algorithm::kHierarchical);
  EXPECT_EQ(table.choose(CollectiveKind::kAllReduce, {8, 2, 2, 1}), Algorithm::kRabenseifner);
}

TEST(AlgorithmTable, WhatCannotBeUnderstoodIsRefusedWithWhatWasExpected) {
  EXPECT_EQ(errorOf("all_reduce"),
            "FARANDOLE_ALGORITHMS is 'all_reduce'; expected operation=algorithm or operation:bytes-bytes=algorithm, in "
            "'all_reduce'");
  EXPECT_NE(errorOf("broadcast=chain,all_reduce=chain")
                .find("expected one of slots, windows (on one host), or one of flat, recursive_doubling, rabenseifner"),
            std::string::npos);
  EXPECT_NE(errorOf("gather=flat").find("expected one of memory, messages (on one host) for gather, in"),
            std::string::npos);
  EXPECT_NE(errorOf("barrier=slots").find("expected one of dissemination, hierarchical or"), std::string::npos);
  EXPECT_NE(errorOf("send=slots").find("expected one of all_reduce, reduce, broadcast"), std::string::npos);
  for (const char* range : {"all_reduce:=ring", "all_reduce:64=ring", "all_reduce:-=ring", "all_reduce:2K-1K=ring",
                            "all_reduce:1x-=ring"}) {
    EXPECT_NE(errorOf(range).find("a range of bytes after ':'"), std::string::npos) << range;
  }
  EXPECT_NE(errorOf("all_reduce=hierarchical/").find("hierarchical/ and one of them"), std::string::npos);
  EXPECT_EQ(errorOf(""), "");
}

TEST(AlgorithmTable, TheDescriptionHasALineForEachRuleAndTellsOverrides) {
  const std::size_t rules = AlgorithmTable::defaultRules().size();
  const auto plain = AlgorithmTable().describe();
  EXPECT_EQ(plain.size(), rules);
  const auto swaps = "all_to_all: any bytes, 2 ranks, 1 host, 2 ranks or more on a host: measured";
  EXPECT_EQ(std::ranges::count(plain, swaps), 1);
  EXPECT_EQ(plain[0], "all_reduce: up to 8192 bytes, 2 ranks, 1 host, 2 ranks or more on a host: slots");
  const auto lines = AlgorithmTable::withOverrides("all_reduce:64K-=ring,all_gather:-4K=slots").value().describe();
  EXPECT_EQ(lines.size(), rules + 2);
  EXPECT_EQ(
      lines[0],
      "all_reduce: 65536 bytes or more, any ranks, 2 hosts or more, any ranks on a host: ring (FARANDOLE_ALGORITHMS)");
  EXPECT_EQ(lines[1],
            "all_gather: up to 4096 bytes, 2 ranks, 1 host, 2 ranks or more on a host: slots (FARANDOLE_ALGORITHMS)");
}

}  // namespace
}  // namespace farandole::collective
