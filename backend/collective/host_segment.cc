#include "backend/collective/host_segment.h"

#include <algorithm>
#include <utility>

#include "backend/common/settings.h"
#include "backend/common/text.h"

namespace farandole::collective {
namespace {

constexpr std::size_t kPage = 4096;
constexpr int kToldBits = 16;

std::size_t roundUp(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

Result<std::size_t> HostSegment::windowBytesSetting() {
  const auto bytes = byteSetting("FARANDOLE_SHM_WINDOW_BYTES", kWindowBytes, kSmallestWindow, kLargestWindow);
  if (!bytes) return bytes.status();
  return *bytes / (2 * kPage) * (2 * kPage);
}

std::size_t HostSegment::bytes(int size, std::size_t windowBytes) {
  const auto ranks = static_cast<std::size_t>(size);
  return roundUp(ranks * sizeof(Line)) + ranks * areaBytes(size, windowBytes);
}

Result<transport::SharedMemory> HostSegment::create(int size, std::size_t windowBytes) {
  // Each rank has a part of every window: some elements at least.
  const std::size_t needed = static_cast<std::size_t>(size) * alignof(Line);
  while (windowBytes < needed) windowBytes *= 2;
  auto memory = transport::SharedMemory::create("farandole-group", bytes(size, windowBytes));
  if (memory) reinterpret_cast<Line*>(memory->data())->windowBytes = windowBytes;
  return memory;
}

Result<transport::SharedMemory> HostSegment::open(transport::Descriptor descriptor, int size) {
  auto memory = transport::SharedMemory::open(std::move(descriptor), bytes(size, kSmallestWindow));
  if (!memory) return memory;
  const std::size_t windowBytes = reinterpret_cast<const Line*>(memory->data())->windowBytes;
  if (memory->bytes() != bytes(size, windowBytes)) {
    return Status::internal("shared memory of " + std::to_string(memory->bytes()) + " bytes for " +
                            std::to_string(size) + " ranks and windows of " + std::to_string(windowBytes) +
                            "; expected " + std::to_string(bytes(size, windowBytes)));
  }
  return memory;
}

HostSegment::HostSegment(transport::SharedMemory memory, int index, int size)
    : memory_(std::move(memory)), index_(index), size_(size), windowBytes_(line(0).windowBytes) {}

HostTurn HostSegment::nextTurn(std::uint64_t steps) {
  const HostTurn turn{nextBase_, turns_++};
  nextBase_ += steps;
  return turn;
}

void HostSegment::abandon(int culprit, std::string_view reason) {
  noteReason(reason);
  line(index_).abandonedFor.store(culprit + 2);
}

void HostSegment::noteReason(std::string_view reason) {
  // Others may read the first one.
  if (!std::exchange(hasReason_, true)) cutText(reason, kReasonBytes - 1).copy(line(index_).reason, kReasonBytes - 1);
}

void HostSegment::abort(int rank, std::string_view reason) {
  noteReason(reason);
  int nobody = 0;
  line(0).abortedBy.compare_exchange_strong(nobody, rank + 1);
}

// A word is the turn, counted from 1, and what was told in it. When one is written over the others may be looking for
// what counts in the same turn, no earlier one, for who tells has met them in each of those; and that is the newer one.
void HostSegment::tellForLater(HostTurn turn, std::uint16_t what) {
  auto& [first, second] = line(0).told;
  auto& older = first.load(std::memory_order_relaxed) < second.load(std::memory_order_relaxed) ? first : second;
  older.store((turn.base + 1) << kToldBits | what, std::memory_order_relaxed);
}

std::uint16_t HostSegment::toldBefore(HostTurn turn) const {
  std::uint64_t last = 0;
  for (const auto& told : line(0).told) {
    const std::uint64_t one = told.load(std::memory_order_relaxed);
    if (one >> kToldBits <= turn.base) last = std::max(last, one);
  }
  return static_cast<std::uint16_t>(last);
}

transport::Reading HostSegment::reading() {
  if (reading_ != transport::Reading::kUnknown) return reading_;
  transport::Reading worst = transport::Reading::kCheap;
  for (int index = 0; index < size_; ++index) worst = std::min(worst, toldBy(index));
  return reading_ = worst;
}

Offer& HostSegment::offer(int index, HostTurn turn, int entry) const {
  return reinterpret_cast<Offer*>(area(index) + dataBytes(windowBytes_))[turn.parity() * size_ + entry];
}

std::size_t HostSegment::areaBytes(int size, std::size_t windowBytes) {
  return dataBytes(windowBytes) + roundUp(2 * static_cast<std::size_t>(size) * sizeof(Offer));
}

std::byte* HostSegment::area(int index) const {
  return memory_.data() + roundUp(static_cast<std::size_t>(size_) * sizeof(Line)) +
         static_cast<std::size_t>(index) * areaBytes(size_, windowBytes_);
}

}  // namespace farandole::collective
