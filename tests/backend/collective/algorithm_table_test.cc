#include "backend/collective/algorithm_table.h"

#include <gtest/gtest.h>

#include <algorithm>

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
      for (const int hosts : {1, 2, 3, 17, 1000}) {
        EXPECT_EQ(table.choose(kind, {bytes, 2 * hosts, hosts, 2}), Algorithm::kHierarchical);
        // Else a hierarchical collective would ask for itself between the hosts.
        EXPECT_NE(table.choose(kind, {bytes, hosts, hosts, 1}), Algorithm::kHierarchical);
      }
    }
  }
}

TEST(AlgorithmTable, AnOverrideCountsInItsRangeOnly) {
  const auto table = AlgorithmTable::withOverrides("all_reduce:64K-1M=ring,broadcast:-4096=chain").value();
  const auto allReduce = [&](std::size_t bytes) { return table.choose(CollectiveKind::kAllReduce, {bytes, 2, 2, 1}); };
  EXPECT_EQ(allReduce((64 << 10) - 1), Algorithm::kFlat);
  EXPECT_EQ(allReduce(64 << 10), Algorithm::kRing);
  EXPECT_EQ(allReduce(1 << 20), Algorithm::kRing);
  EXPECT_EQ(allReduce((1 << 20) + 1), Algorithm::kRabenseifner);
  EXPECT_EQ(table.choose(CollectiveKind::kBroadcast, {4096, 2, 2, 1}), Algorithm::kChain);
  EXPECT_EQ(table.choose(CollectiveKind::kBroadcast, {4097, 2, 2, 1}), Algorithm::kBinomial);
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
  EXPECT_NE(errorOf("broadcast=chain,all_reduce=chain").find("expected one of flat, recursive_doubling, rabenseifner"),
            std::string::npos);
  EXPECT_NE(errorOf("gather=flat").find("expected one of all_reduce, reduce, broadcast"), std::string::npos);
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
  const auto onHost = static_cast<std::size_t>(
      std::ranges::count_if(plain, [](const std::string& line) { return line.find(": 1 host, ") != line.npos; }));
  EXPECT_EQ(plain.size(), onHost + rules);
  const auto lines = AlgorithmTable::withOverrides("all_reduce:64K-=ring").value().describe();
  EXPECT_EQ(lines.size(), onHost + rules + 1);
  EXPECT_EQ(lines[onHost],
            "all_reduce: 65536 bytes or more, any ranks, any hosts, any ranks on a host: ring (FARANDOLE_ALGORITHMS)");
}

}  // namespace
}  // namespace farandole::collective
