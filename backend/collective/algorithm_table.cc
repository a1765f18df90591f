#include "backend/collective/algorithm_table.h"

#include <algorithm>
#include <array>
#include <cassert>

#include "backend/collective/host_segment.h"

namespace farandole::collective {
namespace {

using enum Algorithm;
using enum CollectiveKind;
using Range = AlgorithmTable::Range;
using Rule = AlgorithmTable::Rule;

constexpr Range kAny{};
constexpr Range kOne{1, 1};
constexpr Range kSeveral{2, kAny.last};
constexpr Range upTo(std::size_t last) { return {0, last}; }

constexpr Range kTwo{2, 2};
constexpr std::size_t kSlot = HostSegment::kSlotBytes;

// Ranks that share memory.
constexpr Rule onHost(CollectiveKind operation, Range bytes, Range ranks, Algorithm algorithm) {
  return {operation, bytes, ranks, kOne, kSeveral, algorithm};
}

// On one host: in slots everybody reads all data, one meeting instead of two and `size` times the reading. Of two ranks
// each otherwise reduces its half where the other one has put it (from Python 8 KiB 6.9 us either way, 16 KiB 9.2 in
// slots against 7.6, 32 KiB 10.9 against 9.3). Of gather and scatter one rank is idle while the other one reads: a
// large message is copied by both. Two ranks that swap measure. Those for two hosts were measured over TCP
// (docs/design.md, Collectives), those for more are estimates.
constexpr std::array kRules = {
    onHost(kAllReduce, upTo(8 << 10), kTwo, kSlots),
    onHost(kAllReduce, upTo(32 << 10), Range{3, kAny.last}, kSlots),
    onHost(kAllReduce, kAny, kAny, kWindows),
    onHost(kReduce, upTo(8 << 10), kTwo, kSlots),
    onHost(kReduce, upTo(32 << 10), Range{3, kAny.last}, kSlots),
    onHost(kReduce, kAny, kAny, kWindows),
    onHost(kBroadcast, upTo(kSlot), kAny, kSlots),
    onHost(kBroadcast, kAny, kAny, kMessages),
    onHost(kAllGather, upTo(2 * kSmallestRead - 1), kTwo, kSlots),
    onHost(kAllGather, kAny, kTwo, kMeasured),
    onHost(kAllGather, kAny, kAny, kMemory),
    onHost(kReduceScatter, upTo(2 * kSlot), kTwo, kSlots),
    onHost(kReduceScatter, kAny, kAny, kWindows),
    onHost(kAllToAll, upTo(kSmallestRead - 1), kTwo, kSlots),
    onHost(kAllToAll, kAny, kTwo, kMeasured),
    onHost(kAllToAll, kAny, kAny, kMemory),
    onHost(kGather, upTo((512 << 10) - 1), kAny, kMemory),
    onHost(kGather, kAny, kAny, kMessages),
    onHost(kScatter, upTo((512 << 10) - 1), kAny, kMemory),
    onHost(kScatter, kAny, kAny, kMessages),
    Rule{kAllReduce, kAny, kAny, kAny, kSeveral, kHierarchical},
    Rule{kAllReduce, upTo(64 << 10), upTo(2), kAny, kOne, kFlat},
    Rule{kAllReduce, upTo(1 << 20), upTo(2), kAny, kOne, kRabenseifner},
    Rule{kAllReduce, kAny, upTo(2), kAny, kOne, kFlat},
    Rule{kAllReduce, upTo(16 << 10), upTo(4), kAny, kOne, kFlat},
    Rule{kAllReduce, upTo(4 << 10), upTo(8), kAny, kOne, kFlat},
    Rule{kAllReduce, upTo(16 << 10), kAny, kAny, kOne, kRecursiveDoubling},
    Rule{kAllReduce, upTo(128 << 10), Range{9, kAny.last}, kAny, kOne, kRabenseifner},
    Rule{kAllReduce, kAny, upTo(16), kAny, kOne, kDirect},
    Rule{kAllReduce, kAny, kAny, kAny, kOne, kRing},
    Rule{kReduce, kAny, kAny, kAny, kSeveral, kHierarchical},
    Rule{kReduce, upTo(8 << 10), kAny, kAny, kOne, kFlat},
    Rule{kReduce, kAny, upTo(2), kAny, kOne, kFlat},
    Rule{kReduce, kAny, kAny, kAny, kOne, kDirect},
    Rule{kBroadcast, kAny, kAny, kAny, kSeveral, kHierarchical},
    Rule{kBroadcast, upTo(256 << 10), kAny, kAny, kOne, kBinomial},
    Rule{kBroadcast, kAny, kAny, kAny, kOne, kChain},
    Rule{kAllGather, kAny, kAny, kAny, kSeveral, kHierarchical},
    Rule{kAllGather, kAny, upTo(16), kAny, kOne, kDirect},
    Rule{kAllGather, upTo(256 << 10), kAny, kAny, kOne, kDirect},
    Rule{kAllGather, kAny, kAny, kAny, kOne, kRing},
    Rule{kReduceScatter, kAny, kAny, kAny, kSeveral, kHierarchical},
    Rule{kReduceScatter, kAny, kAny, kAny, kOne, kDirect},
    Rule{kBarrier, kAny, kAny, kAny, kSeveral, kHierarchical},
    Rule{kBarrier, kAny, kAny, kAny, kOne, kDissemination},
};

std::string describeRange(const Range& range, const char* one, const char* several) {
  if (range.first == 0 && range.last == kAny.last) return std::string("any ") + several;
  if (range.first == range.last) return std::to_string(range.first) + " " + (range.first == 1 ? one : several);
  if (range.last == kAny.last) return std::to_string(range.first) + " " + several + " or more";
  if (range.first == 0) return "up to " + std::to_string(range.last) + " " + several;
  return std::to_string(range.first) + " to " + std::to_string(range.last) + " " + several;
}

std::string describeRule(const Rule& rule) {
  return std::string(toString(rule.operation)) + ": " + describeRange(rule.bytes, "byte", "bytes") + ", " +
         describeRange(rule.ranks, "rank", "ranks") + ", " + describeRange(rule.hosts, "host", "hosts") + ", " +
         describeRange(rule.mostPerHost, "rank", "ranks") + " on a host: " + std::string(toString(rule.algorithm));
}

}  // namespace

std::string_view toString(CollectiveKind kind) {
  constexpr std::string_view kNames[] = {"broadcast", "all_reduce",     "reduce",     "all_gather", "gather",
                                         "scatter",   "reduce_scatter", "all_to_all", "barrier"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string_view toString(Algorithm algorithm) {
  constexpr std::string_view kNames[] = {
      "flat",          "recursive_doubling", "rabenseifner", "direct",  "ring",   "binomial", "chain",
      "dissemination", "hierarchical",       "slots",        "windows", "memory", "messages", "measured"};
  return kNames[static_cast<std::size_t>(algorithm)];
}

std::span<const Rule> AlgorithmTable::defaultRules() { return kRules; }

Algorithm AlgorithmTable::choose(CollectiveKind operation, const Situation& situation) const {
  const auto fits = [&](const Rule& rule) {
    return rule.operation == operation && rule.bytes.contains(situation.bytes) &&
           rule.ranks.contains(static_cast<std::size_t>(situation.ranks)) &&
           rule.hosts.contains(static_cast<std::size_t>(situation.hosts)) &&
           rule.mostPerHost.contains(static_cast<std::size_t>(situation.mostPerHost));
  };
  if (const auto rule = std::ranges::find_if(overriding_, fits); rule != overriding_.end()) return rule->algorithm;
  const auto rule = std::ranges::find_if(kRules, fits);
  assert(rule != kRules.end());  // the last rule of each operation fits all that is asked
  return rule->algorithm;
}

std::vector<std::string> AlgorithmTable::describe() const {
  std::vector<std::string> lines;
  for (const Rule& rule : overriding_) lines.push_back(describeRule(rule) + " (FARANDOLE_ALGORITHMS)");
  for (const Rule& rule : kRules) lines.push_back(describeRule(rule));
  return lines;
}

}  // namespace farandole::collective
