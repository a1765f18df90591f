// The syntax of FARANDOLE_ALGORITHMS: entries "operation[:[first]-[last]]=algorithm", with commas between them.
#include <algorithm>

#include "backend/collective/algorithm_table.h"
#include "backend/common/settings.h"

namespace farandole::collective {
namespace {

constexpr const char* kName = "FARANDOLE_ALGORITHMS";

using enum Algorithm;

struct Choices {
  CollectiveKind operation;
  std::vector<Algorithm> between;  // beside kHierarchical, which all have
};

const std::vector<Choices>& choices() {
  static const std::vector<Choices> all = {
      {CollectiveKind::kAllReduce, {kFlat, kRecursiveDoubling, kRabenseifner, kDirect, kRing}},
      {CollectiveKind::kReduce, {kFlat, kDirect}},
      {CollectiveKind::kBroadcast, {kBinomial, kChain}},
      {CollectiveKind::kAllGather, {kDirect, kRing}},
      {CollectiveKind::kReduceScatter, {kDirect}},
      {CollectiveKind::kBarrier, {kDissemination}},
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
  const auto add = [&](Algorithm chosen, AlgorithmTable::Range perHost) {
    rules.push_back({known->operation, bytes, {}, {}, perHost, chosen});
  };
  AlgorithmTable::Range betweenPerHost;
  if (algorithm == toString(kHierarchical) || algorithm.starts_with("hierarchical/")) {
    add(kHierarchical, {2, betweenPerHost.last});
    if (algorithm == toString(kHierarchical)) return "";
    algorithm.remove_prefix(std::string_view("hierarchical/").size());
    betweenPerHost = {1, 1};
  }
  const auto chosen = std::ranges::find_if(known->between, [&](Algorithm a) { return toString(a) == algorithm; });
  if (chosen == known->between.end()) {
    return "one of " + listOf(known->between, [](Algorithm a) { return toString(a); }) +
           ", hierarchical or hierarchical/ and one of them for " + std::string(operation);
  }
  add(*chosen, betweenPerHost);
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
