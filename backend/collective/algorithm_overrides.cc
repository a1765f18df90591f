// The syntax of FARANDOLE_ALGORITHMS: entries "operation[:[first]-[last]]=algorithm", with commas between them.
#include <algorithm>
#include <optional>

#include "backend/collective/algorithm_table.h"
#include "backend/common/settings.h"

namespace farandole::collective {
namespace {

constexpr const char* kName = "FARANDOLE_ALGORITHMS";

using enum Algorithm;

struct Choices {
  CollectiveKind operation;
  std::vector<Algorithm> between;    // the hosts; and kHierarchical where there are any
  std::vector<Algorithm> onHost;     // for any number of ranks
  std::vector<Algorithm> onHostTwo;  // for two ranks only
};

const std::vector<Choices>& choices() {
  static const std::vector<Choices> all = {
      {CollectiveKind::kAllReduce, {kFlat, kRecursiveDoubling, kRabenseifner, kDirect, kRing}, {kSlots, kWindows}, {}},
      {CollectiveKind::kReduce, {kFlat, kDirect}, {kSlots, kWindows}, {}},
      {CollectiveKind::kBroadcast, {kBinomial, kChain}, {kSlots, kMessages}, {}},
      {CollectiveKind::kAllGather, {kDirect, kRing}, {kMemory, kMessages}, {kSlots, kWindows, kMeasured}},
      {CollectiveKind::kReduceScatter, {kDirect}, {kWindows}, {kSlots}},
      {CollectiveKind::kAllToAll, {}, {kMemory, kMessages}, {kSlots, kWindows, kMeasured}},
      {CollectiveKind::kGather, {}, {kMemory, kMessages}, {}},
      {CollectiveKind::kScatter, {}, {kMemory, kMessages}, {}},
      {CollectiveKind::kBarrier, {kDissemination}, {}, {}},
  };
  return all;
}

template <typename Items, typename Name>
std::string listOf(const Items& items, const Name& name) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ", ") + std::string(name(item));
  return text;
}

// "a-b", "a-", "-b", both included.
bool parseRange(std::string_view text, AlgorithmTable::Range& range) {
  const std::size_t dash = text.find('-');
  if (dash == std::string_view::npos) return false;
  const std::string_view first = text.substr(0, dash);
  const std::string_view last = text.substr(dash + 1);
  if (first.empty() && last.empty()) return false;
  if (!first.empty()) {
    const auto bytes = parseBytes(first);
    if (!bytes) return false;
    range.first = *bytes;
  }
  if (!last.empty()) {
    const auto bytes = parseBytes(last);
    if (!bytes) return false;
    range.last = *bytes;
  }
  return range.first <= range.last;
}

// What may follow '=', for people.
std::string algorithmsOf(const Choices& choices) {
  std::vector<Algorithm> onHost = choices.onHost;
  onHost.insert(onHost.end(), choices.onHostTwo.begin(), choices.onHostTwo.end());
  const auto name = [](Algorithm algorithm) { return toString(algorithm); };
  std::string text;
  if (!onHost.empty()) text += "one of " + listOf(onHost, name) + " (on one host)";
  if (!choices.between.empty()) {
    text += (text.empty() ? "one of " : ", or one of ") + listOf(choices.between, name) +
            ", hierarchical or hierarchical/ and one of them (between hosts)";
  }
  return text + " for " + std::string(toString(choices.operation));
}

// Adds the rules of one entry; what was expected where it cannot be understood, else nothing.
std::string parseEntry(std::string_view entry, std::vector<AlgorithmTable::Rule>& rules) {
  const std::size_t equals = entry.find('=');
  if (equals == std::string_view::npos) return "operation=algorithm or operation:bytes-bytes=algorithm";
  std::string_view operation = entry.substr(0, equals);
  std::string_view algorithm = entry.substr(equals + 1);
  AlgorithmTable::Range bytes;
  if (const std::size_t colon = operation.find(':'); colon != std::string_view::npos) {
    if (!parseRange(operation.substr(colon + 1), bytes)) return "a range of bytes after ':', as 4K-64K, 64K- or -4K";
    operation = operation.substr(0, colon);
  }
  const auto known =
      std::ranges::find_if(choices(), [&](const Choices& c) { return toString(c.operation) == operation; });
  if (known == choices().end()) {
    return "one of " + listOf(choices(), [](const Choices& c) { return toString(c.operation); }) + " before '='";
  }
  using Range = AlgorithmTable::Range;
  constexpr Range kOne{1, 1};
  constexpr Range kSeveral{2, Range{}.last};
  const auto find = [&](const std::vector<Algorithm>& among) -> std::optional<Algorithm> {
    const auto found = std::ranges::find_if(among, [&](Algorithm a) { return toString(a) == algorithm; });
    return found != among.end() ? std::optional(*found) : std::nullopt;
  };
  if (const auto chosen = find(known->onHost)) {
    rules.push_back({known->operation, bytes, {}, kOne, kSeveral, *chosen});
    return "";
  }
  if (const auto chosen = find(known->onHostTwo)) {
    rules.push_back({known->operation, bytes, {2, 2}, kOne, kSeveral, *chosen});
    return "";
  }
  Range perHost;
  constexpr std::string_view kPrefix = "hierarchical/";
  if (!known->between.empty() && (algorithm == toString(kHierarchical) || algorithm.starts_with(kPrefix))) {
    rules.push_back({known->operation, bytes, {}, kSeveral, kSeveral, kHierarchical});
    if (algorithm == toString(kHierarchical)) return "";
    algorithm.remove_prefix(kPrefix.size());
    perHost = kOne;
  }
  const auto chosen = find(known->between);
  if (!chosen) return algorithmsOf(*known);
  rules.push_back({known->operation, bytes, {}, kSeveral, perHost, *chosen});
  return "";
}

}  // namespace

Result<AlgorithmTable> AlgorithmTable::withOverrides(std::string_view text) {
  AlgorithmTable table;
  table.text_ = text;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string expected = parseEntry(rest.substr(0, comma), table.overriding_);
    if (!expected.empty()) {
      return refuseSetting(kName, text, expected + ", in '" + std::string(rest.substr(0, comma)) + "'");
    }
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return table;
}

Result<AlgorithmTable> AlgorithmTable::fromEnvironment() { return withOverrides(textSetting(kName)); }

}  // namespace farandole::collective
