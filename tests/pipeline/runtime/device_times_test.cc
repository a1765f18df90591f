#include "pipeline/runtime/device_times.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <thread>

namespace farandole::pipeline {
namespace {

using namespace std::chrono_literals;
using Clock = DeviceTimes::Clock;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

// A device whose streams are busy until set times, and do nothing else.
struct SleepingDevice {
  c10::StreamId current = 0;
  std::map<c10::StreamId, Clock::time_point> busyUntil;
  int events = 0;

  void work(Clock::duration time) {
    Clock::time_point& until = busyUntil[current];
    until = std::max(until, Clock::now()) + time;
  }

  static SleepingDevice& instance() {
    static SleepingDevice device;
    return device;
  }
};

struct SleepingGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, SleepingDevice::instance().current);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, stream.device(),
                       std::exchange(SleepingDevice::instance().current, stream.id()));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*index*/,
              const c10::EventFlag flag) const override {
    EXPECT_EQ(flag, c10::EventFlag::BACKEND_DEFAULT) << "others have no time";
    SleepingDevice& device = SleepingDevice::instance();
    if (*event == nullptr) {
      *event = new Clock::time_point();
      ++device.events;
    }
    timeOf(*event) = std::max(Clock::now(), device.busyUntil[stream.id()]);
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
    if (event != nullptr) --SleepingDevice::instance().events;
  }
  bool queryEvent(void* event) const override { return Clock::now() >= timeOf(event); }
  void synchronizeEvent(void* event) const override { std::this_thread::sleep_until(timeOf(event)); }
  double elapsedTime(void* event, void* later, const c10::DeviceIndex /*index*/) const override {
    return std::chrono::duration<double, std::milli>(timeOf(later) - timeOf(event)).count();
  }

  static Clock::time_point& timeOf(void* event) { return *static_cast<Clock::time_point*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SleepingGuard);

class DeviceTimesTest : public testing::Test {
 protected:
  void SetUp() override { SleepingDevice::instance() = {}; }

  static double milliseconds(Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

  SleepingDevice& device_ = SleepingDevice::instance();
};

TEST_F(DeviceTimesTest, MarksArePassedWhenTheDeviceComesToThemNotWhenTheHostDoes) {
  DeviceTimes times(c10::Device(kType, 0));
  const Clock::time_point before = Clock::now();
  device_.work(20ms);
  times.mark(0);
  device_.work(30ms);
  times.mark(1);
  EXPECT_LT(Clock::now() - before, 20ms) << "to set a mark waits for nothing";
  const auto read = times.read(2);
  ASSERT_EQ(read.size(), 2U);
  EXPECT_NEAR(milliseconds(read[1] - read[0]), 30, 1e-3);
  EXPECT_GE(milliseconds(read[0] - before), 20 - 1e-3);
  EXPECT_LE(read[1], Clock::now());
}

TEST_F(DeviceTimesTest, ReadingWaitsForMarksOfAllStreams) {
  DeviceTimes times(c10::Device(kType, 0));
  device_.current = 1;
  device_.work(30ms);
  times.mark(0);
  device_.current = 2;
  times.mark(1);
  device_.current = 0;
  const auto read = times.read(2);
  EXPECT_LE(read[0], Clock::now());
  EXPECT_GT(milliseconds(read[0] - read[1]), 15);
}

TEST_F(DeviceTimesTest, AMarkThatIsSetAgainIsThatOfTheLastTimeAndTakesNoOtherEvent) {
  {
    DeviceTimes times(c10::Device(kType, 0));
    for (std::size_t number : {0, 1, 2}) times.mark(number);
    const auto first = times.read(3);
    EXPECT_EQ(device_.events, 3);
    std::this_thread::sleep_for(5ms);
    for (std::size_t number : {0, 1, 1}) times.mark(number);
    const auto second = times.read(2);
    EXPECT_GT(milliseconds(second[0] - first[2]), 4);
    EXPECT_GE(second[1], second[0]);
    EXPECT_EQ(device_.events, 3);
    EXPECT_TRUE(times.read(0).empty());
  }
  EXPECT_EQ(device_.events, 0);
}

}  // namespace
}  // namespace farandole::pipeline
