#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "backend/c10d/call_counts.h"
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

  // What torch's analyzer reads (torch.distributed.flight_recorder).
  std::string pickle() const;
  // Writes it to `path`, or where torch's settings say when it is empty; returns the path.
  Result<std::string> dump(const std::string& path);

 private:
  friend class GroupFlight;

  FlightLog(std::string keeper, std::size_t capacity, bool dumpsOnFailure, bool onlyActive);

  // `group.ranks` may be empty: the group is the world.
  std::uint32_t addGroup(observe::FlightGroup group, int size);
  void ignoreFailures(std::uint32_t group);
  void failGroup(std::uint32_t group);

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

// A group in the recorder: what its works need to be recorded. Lives as long as its communicator.
class GroupFlight {
 public:
  GroupFlight(FlightLog& log, observe::FlightGroup group, int size, std::shared_ptr<const CallCounts> counts);
  GroupFlight(const GroupFlight&) = delete;
  GroupFlight& operator=(const GroupFlight&) = delete;
  ~GroupFlight();

  observe::FlightRecorder& recorder() const { return *log_.recorder(); }
  // `sequence`: of the operation among the point-to-point operations of the group, or among its collectives.
  observe::FlightRecord record(const char* name, std::chrono::milliseconds timeout, std::uint64_t sequence,
                               bool isPointToPoint) const;
  // The same operation once more, with the next sequence.
  void renumber(observe::FlightRecord& record, std::uint64_t sequence, bool isPointToPoint) const {
    // Counted from 1, as torch does; of the other kind: how many there were.
    const std::uint64_t own = sequence + 1;
    const std::uint64_t others = isPointToPoint ? counts_->collectives.load(std::memory_order_relaxed)
                                                : counts_->pointToPoint.load(std::memory_order_relaxed);
    record.pointToPointNumber = isPointToPoint ? own : others;
    record.collectiveNumber = static_cast<std::uint32_t>(isPointToPoint ? others : own);
    record.operationNumber = own + others;
  }
  // Of `count` entries in a row: they have ended alike, and for this reason where it is an error.
  void end(std::uint64_t first, std::uint64_t count, const Status& status) const {
    const auto state = status ? observe::FlightState::kCompleted : observe::FlightState::kFailed;
    for (std::uint64_t number = first; number < first + count; ++number) recorder().end(number, state);
    if (!status) [[unlikely]]
      recorder().explain(first, status.toString());
  }
  void rename(const std::string& name) const;
  // Once; it is not told of before.
  void describe(const std::string& description) const;
  // Something has failed; dumps when it is the first. Never waits for the dump.
  void fail() const;
  // What fails from here on is no failure.
  void ignoreFailures() const;

 private:
  FlightLog& log_;
  const std::uint32_t id_;
  const std::shared_ptr<const CallCounts> counts_;
};

}  // namespace farandole::backend
