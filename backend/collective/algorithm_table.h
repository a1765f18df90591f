#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/collective/host_segment.h"
#include "backend/common/status.h"

namespace farandole::collective {

enum class Algorithm : std::uint8_t {
  kFlat,
  kRecursiveDoubling,
  kRabenseifner,
  kDirect,
  kRing,
  kBinomial,
  kChain,
  kDissemination,
  kHierarchical,  // in the memory of each host, and one of the others between the hosts
  // On one host.
  kSlots,  // what has no room there goes through the windows, of a broadcast as messages
  kWindows,
  // What has no room in the slots is read where it is, or sent where that is not allowed; what two ranks swap from
  // kSmallestRead on.
  kMemory,
  kMessages,  // what has no room in the slots is sent
  kMeasured,  // of two ranks, from kSmallestRead on: whichever way is the fastest one at present (SwapWays)
};

// What two ranks read, for each: of 16 KiB a slot and reading cost the same.
inline constexpr std::size_t kSmallestRead = 32 << 10;

// What a collective is to be done for.
struct Situation {
  // Of the data; of all ranks' together for all_gather and reduce_scatter; of what one rank gives another for
  // all_to_all, gather and scatter.
  std::size_t bytes;
  int ranks;
  int hosts;
  int mostPerHost;  // ranks on the host that has most
};

// Which algorithm a group uses. Inside a hierarchical collective it is asked again for what
// goes on between the hosts, as for a group with one rank on each. A list of rules, of which
// the first that fits counts; data, and the same on all ranks.
//
// The setting FARANDOLE_ALGORITHMS puts rules before the others:
//   all_reduce=ring                       for all sizes
//   all_reduce=hierarchical/ring          and what goes between the hosts
//   all_reduce:64K-=ring,broadcast:-4K=binomial     from 64 KiB on; up to 4 KiB
//   all_reduce:-16K=slots                 on one host, as each of kSlots and those after it
class AlgorithmTable {
 public:
  struct Range {
    std::size_t first = 0;
    std::size_t last = std::numeric_limits<std::size_t>::max();
    bool contains(std::size_t x) const { return first <= x && x <= last; }
  };
  struct Rule {
    CollectiveKind operation;
    Range bytes;
    Range ranks;
    Range hosts;
    Range mostPerHost;
    Algorithm algorithm;
  };

  AlgorithmTable() = default;
  // With rules before the others, as the setting has them.
  static Result<AlgorithmTable> withOverrides(std::string_view text);
  static Result<AlgorithmTable> fromEnvironment();

  Algorithm choose(CollectiveKind operation, const Situation& situation) const;

  // Of the setting; empty where there are none. Must be equal on all ranks of a group.
  const std::string& overrides() const { return text_; }
  static std::span<const Rule> defaultRules();
  // One line for each rule, for people.
  std::vector<std::string> describe() const;

 private:
  std::string text_;
  std::vector<Rule> overriding_;
};

std::string_view toString(CollectiveKind kind);
std::string_view toString(Algorithm algorithm);

}  // namespace farandole::collective
