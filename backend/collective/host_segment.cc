#include "backend/collective/host_segment.h"

#include <utility>

namespace farandole::collective {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kDataBytes =
    2 * HostSegment::kSlotBytes + HostSegment::kWindows * (HostSegment::kWindowBytes + HostSegment::kResultBytes);

std::size_t roundUp(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

std::size_t HostSegment::bytes(int size) {
  const auto ranks = static_cast<std::size_t>(size);
  return roundUp(ranks * sizeof(Line)) + ranks * areaBytes(size);
}

HostSegment::HostSegment(transport::SharedMemory memory, int index, int size)
    : memory_(std::move(memory)), index_(index), size_(size) {}

HostTurn HostSegment::nextTurn(std::uint64_t steps) {
  const HostTurn turn{nextBase_, static_cast<int>(turns_++ % 2)};
  nextBase_ += steps;
  return turn;
}

void HostSegment::abandon(int culprit, std::string_view reason) {
  noteReason(reason);
  line(index_).abandonedFor.store(culprit + 2);
}

void HostSegment::noteReason(std::string_view reason) {
  // Others may read the first one.
  if (!std::exchange(hasReason_, true)) reason.copy(line(index_).reason, kReasonBytes - 1);
}

void HostSegment::abort(int rank, std::string_view reason) {
  noteReason(reason);
  int nobody = 0;
  line(0).abortedBy.compare_exchange_strong(nobody, rank + 1);
}

bool HostSegment::everybodyReads() {
  for (int index = 0; !everybodyReads_; ++index) {
    if (index == size_) {
      everybodyReads_ = true;
    } else if (!line(index).reads.load(std::memory_order_acquire)) {
      break;
    }
  }
  return everybodyReads_;
}

Offer& HostSegment::offer(int index, HostTurn turn, int entry) const {
  return reinterpret_cast<Offer*>(area(index) + kDataBytes)[turn.parity * size_ + entry];
}

std::size_t HostSegment::areaBytes(int size) {
  return kDataBytes + roundUp(2 * static_cast<std::size_t>(size) * sizeof(Offer));
}

std::byte* HostSegment::area(int index) const {
  return memory_.data() + roundUp(static_cast<std::size_t>(size_) * sizeof(Line)) +
         static_cast<std::size_t>(index) * areaBytes(size_);
}

}  // namespace farandole::collective
