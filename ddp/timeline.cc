#include "ddp/timeline.h"

#include <chrono>
#include <exception>

namespace farandole::ddp {

double Timeline::now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::size_t Timeline::begin(Kind kind, int index) {
  std::lock_guard lock(mutex_);
  events_.push_back({kind, index, rounds_, now(), 0, false});
  return events_.size() - 1;
}

void Timeline::end(std::size_t event) { finish(event, true); }

void Timeline::see(std::size_t event) { finish(event, false); }

void Timeline::finish(std::size_t event, bool isExact) {
  const double time = now();
  std::lock_guard lock(mutex_);
  if (events_[event].end != 0) return;
  events_[event].end = time;
  events_[event].isExact = isExact;
}

void Timeline::mark(Kind kind, int index) {
  std::lock_guard lock(mutex_);
  const double time = now();
  events_.push_back({kind, index, rounds_, time, time, true});
}

void Timeline::endWith(std::size_t event, const WorkPtr& work, c10::DeviceType device) {
  if (!work) {
    end(event);
    return;
  }
  if (device != c10::kCPU) return;
  try {
    work->getFuture()->addCallback([self = shared_from_this(), event](c10::ivalue::Future&) { self->end(event); },
                                   /*uses_future=*/false);
  } catch (const std::exception&) {
    // The backend has no futures: see() it is.
  }
}

void Timeline::endRound() {
  std::lock_guard lock(mutex_);
  ++rounds_;
}

int Timeline::rounds() const {
  std::lock_guard lock(mutex_);
  return rounds_;
}

std::vector<Timeline::Event> Timeline::events() const {
  std::lock_guard lock(mutex_);
  return events_;
}

}  // namespace farandole::ddp
