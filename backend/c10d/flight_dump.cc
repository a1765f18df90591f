#include "backend/c10d/flight_dump.h"

#include <array>
#include <string_view>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <tuple>
#include <utility>

namespace farandole::backend {
namespace {

using observe::FlightEntry;
using observe::FlightGroup;
using observe::FlightRecord;
using observe::FlightState;
using Dict = c10::Dict<c10::IValue, c10::IValue>;

// Where torch records plugins, its analyzer takes any library's name; before, it takes NCCL's only.
#if __has_include(<torch/csrc/distributed/c10d/hooks/FlightRecorderHook.hpp>)
constexpr bool kTakesAnyLibrary = true;
#else
constexpr bool kTakesAnyLibrary = false;
#endif
constexpr std::string_view kPrefix = "farandole:";  // of the profiler's titles

// Numbers of point-to-point operations begin here: the analyzer takes a collective and an operation between two
// ranks with the same number, one after the other, for parts of one batch.
constexpr std::int64_t kPointToPointBase = 1'000'000'000;

// The analyzer knows operations by these names; those that are not here go by their titles.
constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kNames{{
    {"all_reduce_coalesced", "allreduce_coalesced"},
    {"all_reduce_sparse", "all_reduce"},
    {"all_gather_coalesced", kTakesAnyLibrary ? "allgather_coalesced" : "ALLGATHER_coalesced"},
    {"gather_into_tensor", "gather"},
    {"monitored_barrier", kTakesAnyLibrary ? "barrier" : "all_reduce_barrier"},
    {"barrier", kTakesAnyLibrary ? "barrier" : "all_reduce_barrier"},
}};

std::string nameOf(const FlightRecord& record, const FlightGroup& group) {
  std::string name = kTakesAnyLibrary ? "farandole:" : "nccl:";
  std::string_view title = record.name;
  if (title.starts_with(kPrefix)) title.remove_prefix(kPrefix.size());
  if (record.isPointToPoint()) {
    const bool isSend = record.numInputs > 0;
    const bool isOpen = record.peer == FlightRecord::kAnyPeer;
    // Where the analyzer knows no "?" it is given what cannot be.
    const std::string open = kTakesAnyLibrary ? "?" : std::to_string(group.rank);
    return name + (isSend ? "send " : "recv ") + std::to_string(group.rank) + (isSend ? "->" : "<-") +
           (isOpen ? open : std::to_string(record.peer));
  }
  // What is uneven goes as ProcessGroupNCCL does it: the analyzer would expect equal parts.
  if (record.isUneven) return name + (title == "all_gather" ? "_broadcast_oop" : "_reduce_oop");
  for (const auto& [ours, theirs] : kNames) {
    if (title == ours) title = theirs;
  }
  return name.append(title);
}

std::string ranksOf(const FlightGroup& group) {
  std::string text;
  for (const int rank : group.ranks) text += (text.empty() ? "[" : ", ") + std::to_string(rank);
  return text + "]";
}

void addTensors(Dict& dict, const FlightRecord& record) {
  auto sizes = std::array{::c10d::new_list(), ::c10d::new_list()};
  std::array<std::vector<std::string>, 2> dtypes;
  const std::size_t numInputs = std::min<std::size_t>(record.numInputs, FlightRecord::kTensors);
  std::size_t at = 0;
  for (std::size_t i = 0; i < record.numForms; ++i) {
    const FlightRecord::Form form = record.forms[i];
    auto shape = ::c10d::new_list();
    for (std::size_t j = 0; j < form.dims; ++j) shape.push_back(record.sizes[at++]);
    const std::size_t side = i < numInputs ? 0 : 1;
    sizes[side].push_back(shape);
    dtypes[side].emplace_back(c10::toString(static_cast<c10::ScalarType>(form.dtype)));
  }
  const std::size_t outputs = record.isInPlace ? 0 : 1;
  dict.insert(::c10d::input_sizes_key, sizes[0]);
  dict.insert(::c10d::input_dtypes_key, dtypes[0]);
  dict.insert(::c10d::output_sizes_key, sizes[outputs]);
  dict.insert(::c10d::output_dtypes_key, dtypes[outputs]);
  if (record.numInputs > FlightRecord::kTensors) dict.insert("num_inputs", std::int64_t{record.numInputs});
  if (record.numOutputs > FlightRecord::kTensors) dict.insert("num_outputs", std::int64_t{record.numOutputs});
}

// torch knows no failure: what is retired and not completed has timed out, say.
void addState(Dict& dict, const FlightEntry& entry) {
  const bool isCompleted = entry.state == FlightState::kCompleted;
  dict.insert(::c10d::time_created_key, entry.created);
  dict.insert(::c10d::time_discovered_started_key, entry.created);
  dict.insert(::c10d::time_discovered_completed_key, isCompleted ? c10::IValue(entry.ended) : c10::IValue());
  dict.insert(::c10d::state_key, isCompleted ? ::c10d::completed_state : ::c10d::started_state);
  dict.insert(::c10d::retired_key, entry.state != FlightState::kStarted);
  if (isCompleted) dict.insert(::c10d::duration_key, static_cast<double>(entry.ended - entry.created) / 1e6);
  if (entry.state == FlightState::kFailed) {
    dict.insert("time_failed_ns", entry.ended);
    dict.insert("error", entry.error);
  }
}

Dict entryOf(const FlightEntry& entry, const FlightGroup& group) {
  const FlightRecord& record = entry.record;
  Dict dict = ::c10d::new_dict();
  dict.insert(::c10d::record_id_key, static_cast<std::int64_t>(entry.number));
  dict.insert(::c10d::pg_id_key, std::int64_t{record.group});
  dict.insert(::c10d::pg_name_key, std::make_tuple(group.name, group.description));
  dict.insert(::c10d::collective_seq_id_key, std::int64_t{record.collectiveNumber});
  dict.insert(::c10d::p2p_seq_id_key, kPointToPointBase + static_cast<std::int64_t>(record.pointToPointNumber));
  dict.insert(::c10d::op_id_key, static_cast<std::int64_t>(record.operationNumber));
  dict.insert(::c10d::profiling_name_key, nameOf(record, group));
  dict.insert(::c10d::is_p2p_key, record.isPointToPoint());
  dict.insert(::c10d::timeout_key, std::int64_t{record.timeoutMs});
  addTensors(dict, record);
  addState(dict, entry);
  return dict;
}

}  // namespace

std::string pickleSnapshot(const observe::FlightSnapshot& snapshot, bool onlyActive) {
  Dict groups = ::c10d::new_dict();
  for (const auto& [id, group] : snapshot.groups) {
    if (group.description.empty()) continue;  // it was never used
    Dict dict = ::c10d::new_dict();
    dict.insert("name", group.name);
    dict.insert("desc", group.description);
    dict.insert("ranks", ranksOf(group));
    groups.insert(group.name, dict);
  }
  auto entries = ::c10d::new_list();
  for (const FlightEntry& entry : snapshot.entries) {
    const auto group = snapshot.groups.find(entry.record.group);
    if (group == snapshot.groups.end()) continue;
    if (!onlyActive || entry.state != FlightState::kCompleted) entries.push_back(entryOf(entry, group->second));
  }
  Dict dump = ::c10d::new_dict();
  dump.insert(::c10d::version_key, ::c10d::version_val);
  dump.insert(::c10d::pg_config_key, groups);
  dump.insert(::c10d::pg_status_key, ::c10d::new_dict());
  dump.insert(::c10d::entries_key, entries);
  return ::c10d::pickle_str(dump);
}

}  // namespace farandole::backend
