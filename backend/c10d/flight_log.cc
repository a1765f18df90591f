#include "backend/c10d/flight_log.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <numeric>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <vector>

#include "backend/c10d/callback_threads.h"
#include "backend/c10d/flight_dump.h"
#include "backend/common/settings.h"

namespace farandole::backend {
namespace {

// torch's names, older ones last, and its defaults.
const std::vector<std::string> kBufferSize{"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"};
const std::vector<std::string> kDumpOnTimeout{"TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"};
const std::vector<std::string> kOnlyActive{"TORCH_INCLUDE_ONLY_ACTIVE"};
constexpr int kDefaultBufferSize = 2000;
constexpr int kLargestBufferSize = 1 << 22;  // 1 GiB

Result<int> bufferSize() {
  try {
    const int size = ::c10d::getCvarInt(kBufferSize, kDefaultBufferSize);
    if (size <= kLargestBufferSize) return size;
    return Status::invalidArgument(kBufferSize[0] + " is " + std::to_string(size) + "; expected at most " +
                                   std::to_string(kLargestBufferSize));
  } catch (const std::exception& error) {
    return Status::invalidArgument(error.what());
  }
}

Result<bool> flag(const std::vector<std::string>& names, bool fallback) {
  try {
    return ::c10d::getCvarBool(names, fallback);
  } catch (const std::exception& error) {
    return Status::invalidArgument(error.what());
  }
}

}  // namespace

Result<FlightLog*> FlightLog::acquire() {
  static std::mutex mutex;
  static FlightLog* current = nullptr;
  std::lock_guard lock(mutex);
  if (current != nullptr && current->pid_ == getpid()) return current;
  const auto keeper = choiceSetting("FARANDOLE_FLIGHT_RECORDER", "own", {"own", "torch", "off"});
  if (!keeper) return keeper.status();
  const auto size = bufferSize();
  if (!size) return size.status();
  const auto dumpsOnFailure = flag(kDumpOnTimeout, true);
  if (!dumpsOnFailure) return dumpsOnFailure.status();
  const auto onlyActive = flag(kOnlyActive, false);
  if (!onlyActive) return onlyActive.status();
  const bool records = *keeper == "own" && *size > 0;
  // The parent's, in a forked child, stays as it is: its locks may be held by threads that do not exist here.
  current = new FlightLog(*keeper, records ? *size : 0, *dumpsOnFailure, *onlyActive);
  return current;
}

FlightLog::FlightLog(std::string keeper, std::size_t capacity, bool dumpsOnFailure, bool onlyActive)
    : pid_(getpid()),
      keeper_(std::move(keeper)),
      dumpsOnFailure_(dumpsOnFailure),
      onlyActive_(onlyActive),
      recorder_(capacity > 0 ? std::make_unique<observe::FlightRecorder>(capacity) : nullptr) {}

std::uint32_t FlightLog::addGroup(observe::FlightGroup group, int size) {
  // c10d in C++ needs no names; groups are made in the same order on all ranks.
  if (group.name.empty()) group.name = "group " + std::to_string(numGroups_++);
  if (static_cast<int>(group.ranks.size()) != size) {
    group.ranks.resize(size);
    std::iota(group.ranks.begin(), group.ranks.end(), 0);
  }
  const int rank = group.ranks.at(group.rank);
  const std::uint32_t id = recorder_->addGroup(std::move(group));
  std::lock_guard lock(mutex_);
  if (rank_ < 0) rank_ = rank;
  armed_.insert(id);
  return id;
}

void FlightLog::ignoreFailures(std::uint32_t group) {
  std::lock_guard lock(mutex_);
  armed_.erase(group);
}

void FlightLog::failGroup(std::uint32_t group) {
  {
    std::lock_guard lock(mutex_);
    if (armed_.erase(group) == 0) return;
  }
  // One file: a dump that has yet to begin will tell of this failure too.
  if (!dumpsOnFailure_ || isDumpQueued_.exchange(true)) return;
  runBeforeExit([this] {
    isDumpQueued_ = false;
    if (const auto path = dump(""); !path) TORCH_WARN("farandole: no flight recorder dump: ", path.status().toString());
  });
}

std::string FlightLog::pickle() const {
  return pickleSnapshot(recorder_ != nullptr ? recorder_->snapshot() : observe::FlightSnapshot{}, onlyActive_);
}

Result<std::string> FlightLog::dump(const std::string& path) {
  if (recorder_ == nullptr) return Status::unavailable("the flight recorder is off");
  int rank = 0;
  {
    std::lock_guard lock(mutex_);
    rank = rank_;
  }
  if (rank < 0 && path.empty()) return Status::unavailable("there was no process group yet, whose rank names the file");
  std::lock_guard lock(fileMutex_);
  const std::string content = pickle();
  if (path.empty()) {
    // The user may have given torch a writer of another kind; what fails in it is in its log.
    auto& writer = ::c10d::DebugInfoWriter::getWriter(rank);
    writer.write(content);
    return writer.getWriterTarget();
  }
  std::ofstream file(path, std::ios::binary);
  file << content;
  file.close();
  if (!file) return Status::unavailable("cannot write '" + path + "': " + std::strerror(errno));
  return path;
}

GroupFlight::GroupFlight(FlightLog& log, observe::FlightGroup group, int size, std::shared_ptr<const CallCounts> counts)
    : log_(log), id_(log.addGroup(std::move(group), size)), counts_(std::move(counts)) {}

GroupFlight::~GroupFlight() {
  ignoreFailures();
  recorder().removeGroup(id_);
}

observe::FlightRecord GroupFlight::record(const char* name, std::chrono::milliseconds timeout, std::uint64_t sequence,
                                          bool isPointToPoint) const {
  observe::FlightRecord record;
  record.name = name;
  record.group = id_;
  record.timeoutMs = static_cast<std::uint32_t>(std::min<std::int64_t>(timeout.count(), UINT32_MAX));
  renumber(record, sequence, isPointToPoint);
  return record;
}

void GroupFlight::rename(const std::string& name) const { recorder().nameGroup(id_, name); }

void GroupFlight::describe(const std::string& description) const {
  recorder().describeGroup(id_, description.empty() ? "undefined" : description);
}

void GroupFlight::fail() const { log_.failGroup(id_); }

void GroupFlight::ignoreFailures() const { log_.ignoreFailures(id_); }

}  // namespace farandole::backend
