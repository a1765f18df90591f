#include "backend/observe/flight_recorder.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace farandole::observe {
namespace {

using Sizes = std::vector<std::int64_t>;

FlightRecord recordOf(std::uint64_t operation, const Sizes& sizes = {3}) {
  FlightRecord record;
  record.name = "all_reduce";
  record.group = 1;
  record.operationNumber = operation;
  record.addInput(6, sizes);
  return record;
}

Sizes sizesOf(const FlightRecord& record) { return {record.sizes.begin(), record.sizes.begin() + record.numSizes}; }

TEST(FlightRecorderTest, AnOperationIsFoundWithAllThatWasWrittenOfIt) {
  FlightRecorder recorder(10);
  FlightRecord record = recordOf(7, {2, 3});
  record.peer = 5;
  record.timeoutMs = 1000;
  record.pointToPointNumber = 8;
  record.collectiveNumber = 9;
  record.addOutput(7, Sizes{4});
  recorder.write(recorder.reserve(1), record, FlightState::kStarted);
  const FlightSnapshot snapshot = recorder.snapshot();
  ASSERT_EQ(snapshot.entries.size(), 1U);
  const FlightEntry& entry = snapshot.entries[0];
  EXPECT_EQ(entry.number, 0U);
  EXPECT_EQ(entry.state, FlightState::kStarted);
  EXPECT_GT(entry.created, 0);
  EXPECT_EQ(entry.ended, 0);
  EXPECT_STREQ(entry.record.name, "all_reduce");
  EXPECT_EQ(entry.record.peer, 5);
  EXPECT_TRUE(entry.record.isPointToPoint());
  EXPECT_EQ(entry.record.timeoutMs, 1000U);
  EXPECT_EQ(entry.record.operationNumber, 7U);
  EXPECT_EQ(entry.record.pointToPointNumber, 8U);
  EXPECT_EQ(entry.record.collectiveNumber, 9U);
  ASSERT_EQ(entry.record.numForms, 2);
  EXPECT_EQ(entry.record.forms[0].dtype, 6);
  EXPECT_EQ(entry.record.forms[0].dims, 2);
  EXPECT_EQ(entry.record.forms[1].dtype, 7);
  EXPECT_EQ(sizesOf(entry.record), (Sizes{2, 3, 4}));
}

TEST(FlightRecorderTest, TheEndOfAnOperationIsNotedWithItsTimeAndItsPeer) {
  FlightRecorder recorder(10);
  const std::uint64_t first = recorder.reserve(3);
  FlightRecord record = recordOf(0);
  record.peer = FlightRecord::kAnyPeer;
  for (std::uint64_t i = 0; i < 3; ++i) recorder.write(first + i, record, FlightState::kStarted);
  recorder.setPeer(first, 4);
  recorder.end(first, FlightState::kCompleted);
  recorder.end(first + 1, FlightState::kFailed);
  recorder.explain(first + 1, "rank 1 is gone");
  const FlightSnapshot snapshot = recorder.snapshot();
  ASSERT_EQ(snapshot.entries.size(), 3U);
  EXPECT_EQ(snapshot.entries[0].state, FlightState::kCompleted);
  EXPECT_GE(snapshot.entries[0].ended, snapshot.entries[0].created);
  EXPECT_EQ(snapshot.entries[0].record.peer, 4);
  EXPECT_EQ(snapshot.entries[0].record.group, 1U);  // shares a word with the peer
  EXPECT_EQ(snapshot.entries[1].state, FlightState::kFailed);
  EXPECT_EQ(snapshot.entries[1].error, "rank 1 is gone");
  EXPECT_EQ(snapshot.entries[1].record.peer, FlightRecord::kAnyPeer);
  EXPECT_EQ(snapshot.entries[2].state, FlightState::kStarted);
  EXPECT_TRUE(snapshot.entries[2].error.empty());
}

TEST(FlightRecorderTest, WhatIsDoneAtOnceHasEndedWhenItWasCreated) {
  FlightRecorder recorder(4);
  recorder.write(recorder.reserve(1), recordOf(0), FlightState::kCompleted);
  const FlightEntry entry = recorder.snapshot().entries.at(0);
  EXPECT_EQ(entry.state, FlightState::kCompleted);
  EXPECT_EQ(entry.ended, entry.created);
}

TEST(FlightRecorderTest, OnlyTheLatestOperationsAreKept) {
  constexpr std::uint64_t kCapacity = 5;  // no power of two
  FlightRecorder recorder(kCapacity);
  for (std::uint64_t i = 0; i < 23; ++i) recorder.write(recorder.reserve(1), recordOf(i), FlightState::kStarted);
  recorder.end(2, FlightState::kCompleted);  // long gone
  const FlightSnapshot snapshot = recorder.snapshot();
  ASSERT_EQ(snapshot.entries.size(), kCapacity);
  for (std::uint64_t i = 0; i < kCapacity; ++i) {
    EXPECT_EQ(snapshot.entries[i].number, 18 + i);
    EXPECT_EQ(snapshot.entries[i].record.operationNumber, 18 + i);
    EXPECT_EQ(snapshot.entries[i].state, FlightState::kStarted);
  }
}

TEST(FlightRecorderTest, OfManyTensorsAndDimensionsThereIsStillTheCountAndTheProduct) {
  FlightRecorder recorder(4);
  FlightRecord record;
  record.addInput(6, Sizes{2, 3, 4, 5, 6, 7}, 8);
  record.addInput(6, Sizes{});
  record.addInput(6, Sizes{9});
  record.addOutput(6, Sizes{10});
  recorder.write(recorder.reserve(1), record, FlightState::kStarted);
  const FlightRecord kept = recorder.snapshot().entries.at(0).record;
  EXPECT_EQ(kept.numInputs, 3);
  EXPECT_EQ(kept.numOutputs, 1);
  ASSERT_EQ(kept.numForms, 3);
  EXPECT_EQ(kept.forms[0].dims, 5);
  EXPECT_EQ(kept.forms[1].dims, 0);
  EXPECT_EQ(sizesOf(kept), (Sizes{8, 2, 3, 4, 5 * 6 * 7, 10}));
}

TEST(FlightRecorderTest, AGroupIsKnownForAsLongAsItsOperationsAre) {
  FlightRecorder recorder(3);
  const std::uint32_t group = recorder.addGroup({"0", "", 1, {4, 5}});
  recorder.nameGroup(group, "first");
  recorder.describeGroup(group, "default_pg");
  recorder.write(recorder.reserve(1), recordOf(0), FlightState::kStarted);
  recorder.removeGroup(group);
  recorder.addGroup({"1", "", 0, {5}});
  const FlightSnapshot early = recorder.snapshot();
  ASSERT_EQ(early.groups.size(), 2U);
  EXPECT_EQ(early.groups.at(group).name, "first");
  EXPECT_EQ(early.groups.at(group).description, "default_pg");
  EXPECT_EQ(early.groups.at(group).ranks, (std::vector<int>{4, 5}));
  for (int i = 0; i < 3; ++i) recorder.write(recorder.reserve(1), recordOf(0), FlightState::kStarted);
  recorder.addGroup({"2", "", 0, {5}});
  EXPECT_FALSE(recorder.snapshot().groups.contains(group));
}

TEST(FlightRecorderTest, ErrorsAreBounded) {
  FlightRecorder recorder(1000);
  const std::uint64_t first = recorder.reserve(1000);
  for (std::uint64_t i = 0; i < 1000; ++i) {
    recorder.write(first + i, recordOf(i), FlightState::kFailed);
    recorder.explain(first + i, "why");
  }
  const FlightSnapshot snapshot = recorder.snapshot();
  EXPECT_TRUE(snapshot.entries.front().error.empty());
  EXPECT_EQ(snapshot.entries.back().error, "why");
}

// Each record says the same thing in all its fields, and so shows when two are mixed up.
TEST(FlightRecorderTest, ManyMayWriteWhileOthersReadAndNoEntryIsEverTorn) {
  constexpr int kWriters = 3;
  constexpr std::uint64_t kEach = 20000;
  FlightRecorder recorder(16);  // small: writers overtake each other by a whole ring
  std::atomic<int> writing{kWriters};
  std::vector<std::thread> writers;
  writers.reserve(kWriters);
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&, writer] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        const std::uint64_t mark = i * kWriters + writer;
        FlightRecord record = recordOf(mark, {static_cast<std::int64_t>(mark), 1, static_cast<std::int64_t>(mark)});
        record.pointToPointNumber = mark;
        const std::uint64_t number = recorder.reserve(1);
        recorder.write(number, record, FlightState::kStarted);
        recorder.end(number, mark % 2 == 0 ? FlightState::kCompleted : FlightState::kFailed);
      }
      --writing;
    });
  }
  std::uint64_t seen = 0;
  bool isLast = false;
  while (!isLast) {
    isLast = writing == 0;
    std::uint64_t previous = 0;
    for (const FlightEntry& entry : recorder.snapshot().entries) {
      const std::uint64_t mark = entry.record.operationNumber;
      ASSERT_EQ(entry.record.pointToPointNumber, mark);
      ASSERT_EQ(sizesOf(entry.record), (Sizes{static_cast<std::int64_t>(mark), 1, static_cast<std::int64_t>(mark)}));
      if (entry.state != FlightState::kStarted) {
        ASSERT_EQ(entry.state, mark % 2 == 0 ? FlightState::kCompleted : FlightState::kFailed);
        ASSERT_GT(entry.ended, 0);
      }
      ASSERT_TRUE(previous == 0 || entry.number > previous);
      previous = entry.number;
      ++seen;
    }
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_GT(seen, 0U);
  EXPECT_GT(recorder.reserve(1), 0U);
}

}  // namespace
}  // namespace farandole::observe
