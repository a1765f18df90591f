#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend/observe/tick_clock.h"

namespace farandole::observe {

// A group of ranks, for those who read what was recorded.
struct FlightGroup {
  std::string name;
  std::string description;
  int rank = 0;            // of this process
  std::vector<int> ranks;  // in the world, by rank of the group
};

// What is recorded of one operation. Of its tensors at most kTensors are kept on
// each side, and of their sizes kDims: the last one kept is then the product of the rest.
struct FlightRecord {
  static constexpr std::size_t kTensors = 2;
  static constexpr std::size_t kDims = 5;
  static constexpr std::int16_t kNoPeer = -2;
  static constexpr std::int16_t kAnyPeer = -1;

  struct Form {
    std::uint8_t dtype;  // as the layer above numbers them
    std::uint8_t dims;   // that are kept
  };

  const char* name = "";  // of a text that is never freed
  std::uint32_t group = 0;
  std::int16_t peer = kNoPeer;
  bool isInPlace = false;  // the outputs are the inputs
  bool isUneven = false;   // what the ranks give, or get, differs in size
  std::uint64_t pointToPointNumber = 0;
  std::uint32_t collectiveNumber = 0;
  std::uint32_t timeoutMs = 0;
  std::uint64_t operationNumber = 0;
  std::uint16_t numInputs = 0;  // all of them
  std::uint16_t numOutputs = 0;
  std::uint16_t numForms = 0;  // kept: first of the inputs, then of the outputs
  std::uint16_t numSizes = 0;
  std::array<Form, 2 * kTensors> forms{};
  std::array<std::int64_t, 2 * kTensors * kDims> sizes;  // numSizes of them

  bool isPointToPoint() const { return peer != kNoPeer; }
  // On to the next message of a batch, whose tensors are yet to be added.
  void advance() {
    ++pointToPointNumber;
    ++operationNumber;
    numInputs = numOutputs = numForms = numSizes = 0;
  }
  // Inputs before outputs. `parts`: that many tensors alike are told as one, with one size more; or 0.
  template <typename Sizes>
  void addInput(std::uint8_t dtype, const Sizes& shape, std::int64_t parts = 0) {
    if (numInputs++ < kTensors) keep(dtype, shape, parts);
  }
  template <typename Sizes>
  void addOutput(std::uint8_t dtype, const Sizes& shape, std::int64_t parts = 0) {
    if (numOutputs++ < kTensors) keep(dtype, shape, parts);
  }

 private:
  template <typename Sizes>
  void keep(std::uint8_t dtype, const Sizes& shape, std::int64_t parts) {
    Form& form = forms[numForms++];
    form = {dtype, 0};
    const auto add = [&](std::int64_t size) {
      if (form.dims == kDims) {
        sizes[numSizes - 1] *= size;
      } else {
        sizes[numSizes++] = size;
        ++form.dims;
      }
    };
    if (parts > 0) add(parts);
    for (const std::int64_t size : shape) add(size);
  }
};

enum class FlightState : std::uint8_t { kStarted, kCompleted, kFailed };

struct FlightEntry {
  std::uint64_t number;  // counts all operations of the process
  FlightState state;
  std::int64_t created;  // nanoseconds since the epoch
  std::int64_t ended;    // the same; 0 while it is pending
  FlightRecord record;
  std::string error;
};

struct FlightSnapshot {
  std::vector<FlightEntry> entries;  // oldest first
  std::map<std::uint32_t, FlightGroup> groups;
};

// The latest operations of a process, in a ring of a fixed size. Recording takes
// no lock, allocates nothing and costs about 30 ns, the end of an operation 10: an entry is
// claimed by its version, written, and released; its end is one store. Who reads skips an
// entry that changes meanwhile. An operation that finds its place taken, for a whole ring was
// recorded while another thread wrote one entry, is not recorded; an end that comes so late
// may hide the end of the operation that has its place.
//
// Thread: any.
class FlightRecorder {
 public:
  // Keeps the latest `capacity` operations, at least one.
  explicit FlightRecorder(std::size_t capacity);

  // Groups are numbered from 1. One that is removed is forgotten once its operations are.
  std::uint32_t addGroup(FlightGroup group);
  void nameGroup(std::uint32_t group, const std::string& name);
  void describeGroup(std::uint32_t group, const std::string& description);
  void removeGroup(std::uint32_t group);

  // Numbers for `count` operations in a row, each of which is then written once.
  std::uint64_t reserve(std::uint64_t count) { return next_.fetch_add(count, std::memory_order_relaxed); }
  void write(std::uint64_t number, const FlightRecord& record, FlightState state) noexcept;
  // It has ended now. Nothing where it is in the ring no more; so too below.
  void end(std::uint64_t number, FlightState state) noexcept;
  // Whom it was with, where that was open.
  void setPeer(std::uint64_t number, std::int16_t peer) noexcept;
  // Why it has failed. Kept for the latest failures only.
  void explain(std::uint64_t number, std::string error);

  std::size_t capacity() const { return capacity_; }
  FlightSnapshot snapshot() const;

 private:
  static constexpr std::size_t kWords = sizeof(FlightRecord) / sizeof(std::uint64_t);

  // The version is twice the number of its operation plus 2, or 0; one more while it is being written.
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> version{0};
    std::atomic<std::uint64_t> outcome{0};  // packOutcome() in the source
    std::atomic<TickClock::Ticks> created{0};
    std::array<std::atomic<std::uint64_t>, kWords> words{};
  };
  struct Group {
    FlightGroup group;
    std::uint64_t removedAt = ~std::uint64_t{0};  // the number of the next operation then
  };

  Slot& slotOf(std::uint64_t number) const { return slots_[number & ((std::uint64_t{1} << slotBits_) - 1)]; }
  bool read(std::uint64_t number, const TickClock::Converter& convert, FlightEntry& entry) const;
  void forgetGroups();

  const TickClock clock_;
  const std::size_t capacity_;
  const int slotBits_;  // there are two to the power of it
  const std::unique_ptr<Slot[]> slots_;
  alignas(64) std::atomic<std::uint64_t> next_{0};
  mutable std::mutex mutex_;
  std::map<std::uint32_t, Group> groups_;
  std::uint32_t lastGroup_ = 0;
  std::deque<std::pair<std::uint64_t, std::string>> errors_;
};

}  // namespace farandole::observe
