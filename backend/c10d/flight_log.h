#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "backend/common/status.h"
#include "backend/observe/flight_recorder.h"

namespace farandole::backend {

// The flight recorder of the process, and when and where it is dumped: into the
// file that torch's own recorders write to, when an operation of a group fails
// for the first time, on a callback thread. Made with the first group and never
// destroyed; a forked child gets its own. Any thread.
//
// Settings: FARANDOLE_FLIGHT_RECORDER, and torch's for its recorders, by the
// names that torch gives them (docs/settings.md).
class FlightLog {
 public:
  // Makes it when there is none; an error names the setting that it cannot understand.
  static Result<FlightLog*> acquire();

  // "own", "torch" or "off".
  const std::string& keeper() const { return keeper_; }
  // Null unless this records.
  observe::FlightRecorder* recorder() const { return recorder_.get(); }

  // A group that is about to be used. `group.ranks` may be empty: the world's are those of the group.
  std::uint32_t addGroup(observe::FlightGroup group, int size);
  // What fails in it from here on is no failure.
  void ignoreFailures(std::uint32_t group);
  void removeGroup(std::uint32_t group);

  // Operation `number` has failed; dumps when it is the group's first. Never waits for the dump.
  void fail(std::uint32_t group, std::uint64_t number, std::string error);
  // The same for a group that is over.
  void failGroup(std::uint32_t group);

  // What torch's analyzer reads (torch.distributed.flight_recorder).
  std::string pickle() const;
  // Writes it to `path`, or where torch's settings say when it is empty; returns the path.
  Result<std::string> dump(const std::string& path);

 private:
  FlightLog(std::string keeper, std::size_t capacity, bool dumpsOnFailure, bool onlyActive);

  const int pid_;
  const std::string keeper_;
  const bool dumpsOnFailure_;
  const bool onlyActive_;
  const std::unique_ptr<observe::FlightRecorder> recorder_;
  std::mutex mutex_;
  std::set<std::uint32_t> armed_;  // groups in which nothing has failed
  std::atomic<int> numGroups_{0};
  int rank_ = -1;  // in the world
  std::atomic<bool> isDumpQueued_{false};
  std::mutex fileMutex_;
};

// What a Work needs to be recorded; `log` is null where it is not to be.
struct FlightTicket {
  FlightLog* log = nullptr;
  std::uint32_t group = 0;
  std::uint32_t collectiveNumber = 0;
  std::uint64_t pointToPointNumber = 0;
  std::uint64_t operationNumber = 0;

  observe::FlightRecord record(const char* name, std::chrono::milliseconds timeout) const {
    observe::FlightRecord record;
    record.name = name;
    record.group = group;
    record.pointToPointNumber = pointToPointNumber;
    record.collectiveNumber = collectiveNumber;
    record.timeoutMs = static_cast<std::uint32_t>(std::min<std::int64_t>(timeout.count(), UINT32_MAX));
    record.operationNumber = operationNumber;
    return record;
  }
};

}  // namespace farandole::backend
