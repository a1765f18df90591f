#include "backend/c10d/cuda/stream_gates.h"

#include <algorithm>

#include "backend/transport/nccl/device_visit.h"

namespace farandole::backend {
namespace {

// Between looks by timer; longer and longer while they are in vain.
constexpr std::chrono::microseconds kShortest{20};
constexpr std::chrono::microseconds kLongest{200};

}  // namespace

void StreamGates::add(const std::shared_ptr<StreamMark>& mark, c10::intrusive_ptr<GatedMessagesWork> work) {
  const bool wasEmpty = gates_.empty();
  gates_.push_back({mark, std::move(work)});
  (void)openPassed();
  if (!wasEmpty || gates_.empty()) return;
  engine_.addPoller(*this);
  loop_.post([this] { tickFromLoop(kShortest); });
}

Result<bool> StreamGates::isPassed(StreamMark& mark) {
  if (mark.isPassed) return true;
  const std::pair stream(mark.device, mark.stream);
  if (std::ranges::find(behind_, stream) != behind_.end()) return false;
  const transport::DeviceVisit visit(cuda_, mark.device);
  const auto passed = mark.event.hasRun();
  if (!passed) return passed;
  mark.isPassed = *passed;
  if (!*passed) behind_.push_back(stream);
  return passed;
}

bool StreamGates::settle(const Gate& gate, const std::vector<Gate>& held) {
  if (gate.work->isDone()) return true;
  const auto passed = isPassed(*gate.mark);
  if (!passed) {
    gate.work->fail(passed.status());
    return true;
  }
  const auto mustFollow = [&](const Gate& earlier) { return gate.work->mustFollow(*earlier.work); };
  if (!*passed || std::ranges::any_of(held, mustFollow)) return false;
  gate.work->open();
  return true;
}

bool StreamGates::openPassed() {
  behind_.clear();
  std::vector<Gate> held;
  const bool hadSome = !gates_.empty();
  for (Gate& gate : gates_) {
    if (!settle(gate, held)) {
      held.push_back(std::move(gate));
      continue;
    }
    // The last reference may free tensors, and the communicator.
    engine_.defer([work = std::move(gate.work)] {});
  }
  const bool any = held.size() < gates_.size();
  gates_.swap(held);
  if (hadSome && gates_.empty()) engine_.removePoller(*this);
  return any;
}

void StreamGates::tickFromLoop(std::chrono::nanoseconds interval) {
  {
    transport::ProgressEngine::Access access(engine_);
    if (gates_.empty()) return;
    if (openPassed()) interval = kShortest;
    if (gates_.empty()) return;
  }
  tick_.expires_after(interval);
  tick_.async_wait(
      [this, next = std::min<std::chrono::nanoseconds>(interval * 5 / 4, kLongest)](boost::system::error_code error) {
        if (!error) tickFromLoop(next);
      });
}

}  // namespace farandole::backend
