#include "ddp/timeline.h"

#include <gtest/gtest.h>

#include <thread>

namespace farandole::ddp {
namespace {

// Ends when told to.
class ToldWork : public c10d::Work {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void complete() { future_->markCompleted(c10::IValue(1)); }
  void fail() { future_->setError(std::make_exception_ptr(std::runtime_error("lost"))); }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_ = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
};

TEST(Timeline, WhatHasAFutureEndsWhenThatSaysSoWhateverIsSeenLater) {
  for (const bool fails : {false, true}) {
    const auto timeline = std::make_shared<Timeline>();
    const auto work = c10::make_intrusive<ToldWork>();
    const std::size_t event = timeline->begin(Timeline::Kind::kReduction, 3);
    timeline->endWith(event, work, c10::kCPU);
    EXPECT_EQ(timeline->events()[event].end, 0);
    std::thread([&] { fails ? work->fail() : work->complete(); }).join();
    const double end = timeline->events()[event].end;
    EXPECT_GE(end, timeline->events()[event].start);
    EXPECT_GT(end, 0);
    timeline->see(event);
    EXPECT_EQ(timeline->events()[event].end, end);
    EXPECT_TRUE(timeline->events()[event].isExact);
  }
}

TEST(Timeline, WhatCannotTellItsEndHasBeenSeenToBeOver) {
  const auto timeline = std::make_shared<Timeline>();
  const auto onDevice = c10::make_intrusive<ToldWork>();
  onDevice->complete();  // as soon as it is enqueued
  const std::size_t first = timeline->begin(Timeline::Kind::kReduction, 0);
  timeline->endWith(first, onDevice, c10::kCUDA);
  const std::size_t second = timeline->begin(Timeline::Kind::kReduction, 1);
  timeline->endWith(second, c10::make_intrusive<c10d::Work>(), c10::kCPU);  // has no future
  for (const std::size_t event : {first, second}) {
    EXPECT_EQ(timeline->events()[event].end, 0);
    timeline->see(event);
    EXPECT_GT(timeline->events()[event].end, 0);
    EXPECT_FALSE(timeline->events()[event].isExact);
  }
}

TEST(Timeline, EventsKnowTheirRoundAndTheirOrder) {
  const auto timeline = std::make_shared<Timeline>();
  timeline->mark(Timeline::Kind::kReady, 7);
  timeline->endWith(timeline->begin(Timeline::Kind::kReduction, 1), nullptr, c10::kCPU);
  timeline->endRound();
  timeline->end(timeline->begin(Timeline::Kind::kWait));
  EXPECT_EQ(timeline->rounds(), 1);
  const std::vector<Timeline::Event> events = timeline->events();
  ASSERT_EQ(events.size(), 3);
  EXPECT_EQ(events[0].start, events[0].end);
  EXPECT_EQ(events[0].index, 7);
  for (std::size_t e = 0; e < events.size(); ++e) {
    EXPECT_EQ(events[e].round, e == 2 ? 1 : 0);
    EXPECT_TRUE(events[e].isExact);
    if (e > 0) EXPECT_GE(events[e].start, events[e - 1].start);
  }
}

}  // namespace
}  // namespace farandole::ddp
