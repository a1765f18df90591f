#include "backend/observe/flight_recorder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace farandole::observe {
namespace {

static_assert(std::is_trivially_copyable_v<FlightRecord> && sizeof(FlightRecord) % sizeof(std::uint64_t) == 0);
// So many words come before the sizes, of which mostly one or two are written.
constexpr std::size_t kHead = offsetof(FlightRecord, sizes) / sizeof(std::uint64_t);
constexpr std::size_t kPeerWord = offsetof(FlightRecord, peer) / sizeof(std::uint64_t);

constexpr std::size_t kMostErrors = 64;
constexpr int kReadAttempts = 100;  // an entry is being written for some 10 ns, unless its thread has lost its core

std::uint64_t wordOf(const FlightRecord& record, std::size_t index) {
  std::uint64_t word = 0;
  std::memcpy(&word, reinterpret_cast<const char*>(&record) + index * sizeof(word), sizeof(word));
  return word;
}

// State, ticks that it took, and the number it belongs to: in one word, for it is stored with nothing claimed.
constexpr int kStateBits = 2;
constexpr int kTickBits = 46;  // some hours; more is told as that
constexpr std::uint64_t kMostTicks = (std::uint64_t{1} << kTickBits) - 1;

std::uint64_t packOutcome(std::uint64_t round, FlightState state, std::uint64_t ticks) {
  return round << (kStateBits + kTickBits) | std::min(ticks, kMostTicks) << kStateBits |
         static_cast<std::uint64_t>(state);
}

void setWord(FlightRecord& record, std::size_t index, std::uint64_t word) {
  std::memcpy(reinterpret_cast<char*>(&record) + index * sizeof(word), &word, sizeof(word));
}

}  // namespace

FlightRecorder::FlightRecorder(std::size_t capacity)
    : capacity_(std::max<std::size_t>(capacity, 1)),
      slotBits_(std::countr_zero(std::bit_ceil(capacity_))),
      slots_(std::make_unique<Slot[]>(std::size_t{1} << slotBits_)) {}

// What is written while the version says so is stored with release, and read with acquire before the
// version is looked at again: who has read any of it sees that the version has changed. On x86 these
// are plain moves.
void FlightRecorder::write(std::uint64_t number, const FlightRecord& record, FlightState state) noexcept {
  const TickClock::Ticks now = clock_.now();
  Slot& slot = slotOf(number);
  const std::uint64_t version = 2 * number + 2;
  std::uint64_t before = slot.version.load(std::memory_order_relaxed);
  if ((before & 1) != 0 || before >= version) return;
  if (!slot.version.compare_exchange_strong(before, version + 1, std::memory_order_acquire)) return;
  slot.outcome.store(packOutcome(number >> slotBits_, state, 0), std::memory_order_release);
  slot.created.store(now, std::memory_order_release);
  const std::size_t numWords = kHead + record.numSizes;
  for (std::size_t i = 0; i < numWords; ++i) slot.words[i].store(wordOf(record, i), std::memory_order_release);
  slot.version.store(version, std::memory_order_release);
}

void FlightRecorder::end(std::uint64_t number, FlightState state) noexcept {
  Slot& slot = slotOf(number);
  if (slot.version.load(std::memory_order_relaxed) != 2 * number + 2) return;
  const std::uint64_t took = clock_.now() - slot.created.load(std::memory_order_relaxed);
  slot.outcome.store(packOutcome(number >> slotBits_, state, took), std::memory_order_release);
}

void FlightRecorder::setPeer(std::uint64_t number, std::int16_t peer) noexcept {
  Slot& slot = slotOf(number);
  const std::uint64_t version = 2 * number + 2;
  std::uint64_t expected = version;
  if (!slot.version.compare_exchange_strong(expected, version + 1, std::memory_order_acquire)) return;
  FlightRecord record;
  setWord(record, kPeerWord, slot.words[kPeerWord].load(std::memory_order_relaxed));
  record.peer = peer;
  slot.words[kPeerWord].store(wordOf(record, kPeerWord), std::memory_order_release);
  slot.version.store(version, std::memory_order_release);
}

void FlightRecorder::explain(std::uint64_t number, std::string error) {
  std::lock_guard lock(mutex_);
  if (errors_.size() == kMostErrors) errors_.pop_front();
  errors_.emplace_back(number, std::move(error));
}

bool FlightRecorder::read(std::uint64_t number, const TickClock::Converter& convert, FlightEntry& entry) const {
  const Slot& slot = slotOf(number);
  const std::uint64_t version = 2 * number + 2;
  for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
    const std::uint64_t before = slot.version.load(std::memory_order_acquire);
    if (before == version + 1) continue;
    if (before != version) return false;  // it is not written yet, or its place is another's already
    entry.number = number;
    const std::uint64_t outcome = slot.outcome.load(std::memory_order_acquire);
    const TickClock::Ticks created = slot.created.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < kWords; ++i) {
      setWord(entry.record, i, slot.words[i].load(std::memory_order_acquire));
    }
    if (slot.version.load(std::memory_order_relaxed) != version) continue;
    const std::uint64_t took = outcome >> kStateBits & kMostTicks;
    constexpr std::uint64_t kStates = (1 << kStateBits) - 1;
    const bool isItsOwn =
        outcome == packOutcome(number >> slotBits_, static_cast<FlightState>(outcome & kStates), took);
    entry.state = isItsOwn ? static_cast<FlightState>(outcome & kStates) : FlightState::kStarted;
    entry.created = convert(created);
    entry.ended = entry.state == FlightState::kStarted ? 0 : convert(created + took);
    return true;
  }
  return false;
}

FlightSnapshot FlightRecorder::snapshot() const {
  FlightSnapshot snapshot;
  const TickClock::Converter convert(clock_);
  const std::uint64_t last = next_.load(std::memory_order_relaxed);
  const std::uint64_t first = last > capacity_ ? last - capacity_ : 0;
  snapshot.entries.reserve(last - first);
  for (std::uint64_t number = first; number < last; ++number) {
    FlightEntry entry{};
    if (read(number, convert, entry)) snapshot.entries.push_back(std::move(entry));
  }
  std::lock_guard lock(mutex_);
  for (const auto& [id, group] : groups_) snapshot.groups.emplace(id, group.group);
  for (const auto& [number, error] : errors_) {
    const auto at =
        std::lower_bound(snapshot.entries.begin(), snapshot.entries.end(), number,
                         [](const FlightEntry& entry, std::uint64_t wanted) { return entry.number < wanted; });
    if (at != snapshot.entries.end() && at->number == number) at->error = error;
  }
  return snapshot;
}

std::uint32_t FlightRecorder::addGroup(FlightGroup group) {
  std::lock_guard lock(mutex_);
  forgetGroups();
  groups_[++lastGroup_].group = std::move(group);
  return lastGroup_;
}

void FlightRecorder::nameGroup(std::uint32_t group, const std::string& name) {
  std::lock_guard lock(mutex_);
  if (const auto at = groups_.find(group); at != groups_.end()) at->second.group.name = name;
}

void FlightRecorder::describeGroup(std::uint32_t group, const std::string& description) {
  std::lock_guard lock(mutex_);
  if (const auto at = groups_.find(group); at != groups_.end()) at->second.group.description = description;
}

void FlightRecorder::removeGroup(std::uint32_t group) {
  std::lock_guard lock(mutex_);
  if (const auto at = groups_.find(group); at != groups_.end()) at->second.removedAt = next_.load();
}

void FlightRecorder::forgetGroups() {
  const std::uint64_t next = next_.load();
  std::erase_if(groups_, [&](const auto& entry) {
    return entry.second.removedAt <= next && next - entry.second.removedAt >= capacity_;
  });
}

}  // namespace farandole::observe
