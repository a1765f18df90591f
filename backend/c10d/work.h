#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "backend/c10d/flight_log.h"
#include "backend/c10d/profiled_range.h"
#include "backend/c10d/work_hooks.h"
#include "backend/collective/communicator.h"
#include "backend/collective/program.h"
#include "backend/common/fork_count.h"

namespace farandole::backend {

using collective::Communicator;
using std::chrono::milliseconds;

// What a Work needs to know beside its operation.
struct WorkOptions {
  int rank;
  ::c10d::OpType type;
  const char* title;  // shown by the profiler
  std::uint64_t sequence;
  milliseconds timeout;
  WorkHooks::OnDone onDone;             // or empty
  bool isDoneAtOnce = false;            // it is called as soon as the work has ended
  const GroupFlight* flight = nullptr;  // or it is not recorded
  std::uint64_t key = 0;                // what torch knows it by (WorkHooks::keyIfTold)
};

// What getFutureResult() tells.
::c10d::WorkResult resultOf(const Status& status);
// What getDuration() has: throws where it is negative.
void checkDuration(::c10d::OpType type, float milliseconds);

// An operation as c10d sees it. The operation is the state; c10d::Work's own
// mutex, condition and flags stay unused.
template <typename Base>
class WorkOf : public ::c10d::Work, public Base {
 public:
  WorkOf(std::shared_ptr<Communicator> communicator, WorkOptions options);

  // Starts the operation, with the transport held for as short as can be.
  void launch();

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return Base::results(); }
  void synchronize() override { wait(); }
  // With a timeout: a collective that is not done by then goes on, and may be waited for again; a message is given up.
  bool wait(milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // A future of a WorkResult: it never holds an error.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  // Milliseconds; only of a finished work that was launched with timing or hooks on.
  float getDuration() const override;
  std::uint64_t getSequencenumber() const override { return sequence_; }
  // Overrides from torch 2.12 on.
  // NOLINTNEXTLINE(modernize-use-override)
  virtual milliseconds getTimeout() const { return timeout_; }
  // Overrides where torch has it (2.15).
  // NOLINTNEXTLINE(modernize-use-override)
  virtual std::uint64_t getCompletionKey() const { return key_; }

 protected:
  void ending(const Status& status) override;
  void retain() override { c10::raw::intrusive_ptr::incref(this); }
  void release() override { c10::raw::intrusive_ptr::decref(this); }

 private:
  void endRange() const {
    if (range_ != nullptr) range_->end();
  }
  void report(std::chrono::steady_clock::time_point started);
  // For who hears of failures only. With the transport held.
  void awaitFailure();
  void tellFailure();
  // For the flight recorder. With the transport held.
  void beginFlight();
  void endFlight(const Status& status);
  // Once, by whoever comes first: what is chained to it runs there.
  void completeFuture();
  c10::intrusive_ptr<WorkOf> self() { return c10::intrusive_ptr<WorkOf>::reclaim_copy(this); }

  const char* const title_;
  const std::uint64_t sequence_;
  const milliseconds timeout_;
  const WorkHooks::OnDone onDone_;
  const bool isDoneAtOnce_;
  const GroupFlight* const flight_;
  const std::uint64_t key_;
  std::unique_ptr<ProfiledRange> range_;          // only while somebody listens
  std::uint64_t flightNumber_ = 0;                // of its first entry in the recorder
  std::atomic<float> duration_{-1};               // milliseconds, or negative
  const std::uint32_t forks_ = ForkCount::now();  // as it was begun
  std::mutex futureMutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> hasFuture_{false};
  std::atomic<bool> isFutureComplete_{false};
  c10::intrusive_ptr<c10::ivalue::Future> futureResult_;
};

// One send or receive; or, in a batch, all with one peer.
class MessagesOperation : public collective::Operation {
 public:
  struct Item {
    at::Tensor tensor;
    int peer;  // or kAnySource
    std::uint32_t tag;
    bool isSend;
    std::uint64_t key = 0;  // in a batch, and where somebody is told: what torch knows it by
  };
  // Before launch().
  void setItem(Item item) { items_.push_back(std::move(item)); }
  void setItems(std::vector<Item> items, std::string label) {
    items_.assign(std::make_move_iterator(items.begin()), std::make_move_iterator(items.end()));
    label_ = std::move(label);
  }

 protected:
  using Operation::Operation;
  std::string describe() const override;
  // What is received.
  std::vector<at::Tensor> results() const;
  bool postNext() override;
  Status mismatch(const collective::Message& message) override;
  std::span<collective::Message> messages() override { return {messages_.data(), posted_}; }
  std::shared_ptr<void> keepBuffers() override { return std::make_shared<std::vector<at::Tensor>>(results()); }
  static constexpr bool kIsPointToPoint = true;
  // An entry for each message, numbered in a row from what is returned.
  std::uint64_t recordFlight(observe::FlightRecorder& recorder, observe::FlightRecord& record, ::c10d::OpType type,
                             observe::FlightState state) const;
  std::uint32_t numFlightEntries() const { return static_cast<std::uint32_t>(items_.size()); }
  // What torch knows these messages by, of a work that it knows by `own`.
  c10::SmallVector<std::uint64_t, 1> keys(std::uint64_t own) const;
  // Once done: the source of what was received from any rank.
  std::int16_t foundPeer() const {
    const bool isFound = items_[0].peer == collective::kAnySource && posted_ > 0;
    return isFound ? static_cast<std::int16_t>(messages_[0].peer) : observe::FlightRecord::kNoPeer;
  }

  std::string label_;  // of the batch
  c10::SmallVector<Item, 1> items_;
  c10::SmallVector<collective::Message, 1> messages_;
  std::size_t posted_ = 0;

 private:
  void post(const Item& item);
  const Item& itemOf(const collective::Message& message) const;
  Status takeContradictions();

  // Of the messages that are done: the first for which the peer has another dtype or size, and how many more.
  Status contradiction_;
  int moreContradictions_ = 0;
};

class MessagesWork final : public WorkOf<MessagesOperation> {
 public:
  using WorkOf::WorkOf;
  int sourceRank() const override { return posted_ > 0 ? messages_[0].peer : items_[0].peer; }
};

// A program and the tensors that it works on.
class CollectiveOperation : public collective::ProgramOperation {
 public:
  // Before launch(). `others` are read or written and are no results.
  void setTensors(std::vector<at::Tensor> results, std::vector<at::Tensor> others) {
    results_ = std::move(results);
    others_ = std::move(others);
  }

 protected:
  using ProgramOperation::ProgramOperation;
  std::vector<at::Tensor> results() const { return results_; }
  std::string describeReduction(std::uint16_t code) const override;
  std::shared_ptr<void> keepBuffers() override;
  static constexpr bool kIsPointToPoint = false;
  std::uint64_t recordFlight(observe::FlightRecorder& recorder, observe::FlightRecord& record, ::c10d::OpType type,
                             observe::FlightState state) const;
  std::uint32_t numFlightEntries() const { return 1; }
  static c10::SmallVector<std::uint64_t, 1> keys(std::uint64_t own) { return {own}; }
  std::int16_t foundPeer() const { return observe::FlightRecord::kNoPeer; }

 private:
  std::vector<at::Tensor> results_;
  std::vector<at::Tensor> others_;
};

class CollectiveWork final : public WorkOf<CollectiveOperation> {
 public:
  using WorkOf::WorkOf;

 protected:
  std::string describe() const override;
};

}  // namespace farandole::backend
