#include "backend/c10d/repeated_messages.h"

#include <c10/core/ScalarType.h>

#include <array>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/c10d/contract.h"

namespace farandole::backend {
namespace {

using collective::Communicator;
using observe::FlightState;
using transport::ProgressEngine;

// Lives on alone when its owner is gone before the transport has let go of the buffer.
class RepeatedOperation final : public collective::Operation, public std::enable_shared_from_this<RepeatedOperation> {
 public:
  RepeatedOperation(std::shared_ptr<Communicator> communicator, std::chrono::milliseconds timeout,
                    const GroupFlight* flight, const RepeatedMessageSpec& spec)
      : Operation(std::move(communicator)),
        spec_(spec),
        element_(elementOf(dtype())),
        flight_(flight),
        record_(flight != nullptr ? describeForFlight(timeout) : observe::FlightRecord{}) {
    setTimeout(timeout);
  }

  void startWith(void* data, CallCounts& counts) {
    ProgressEngine::Access access(communicator_->engine());
    rearm();
    data_ = data;
    start();
    // Now that it is under way.
    const std::uint64_t sequence = counts.pointToPoint.fetch_add(1, std::memory_order_relaxed);
    if (flight_ != nullptr) record(sequence);
  }

  void await() {
    if (!isDone() && !wait(deadline())) communicator_->timeOut(*this, timeout());
  }

  void keep(std::shared_ptr<void> buffer) {
    // Let go of, where it is not needed, with nothing held.
    ProgressEngine::Access access(communicator_->engine());
    if (isInFlight()) kept_.push_back(std::move(buffer));
  }

  // Also when it is done: by a thread that may still be about to leave it.
  void giveUp() {
    ProgressEngine::Access access(communicator_->engine());
    if (!isInFlight()) return;
    self_ = shared_from_this();
    fail(Status::aborted("it was given up"));
  }

 protected:
  std::string describe() const override {
    return (spec_.isSend ? "repeated send to " : "repeated recv from ") + communicator_->describe(spec_.peer) +
           " (tag " + std::to_string(spec_.tag) + ", " + std::to_string(spec_.bytes) + " bytes)";
  }

  bool postNext() override {
    notePostedAll();
    const auto tag = static_cast<std::uint32_t>(spec_.tag);
    if (spec_.isSend) {
      postSend(message_, spec_.peer, p2p::MessageKind::kPointToPoint, tag, data_, spec_.bytes, element_);
    } else {
      postRecv(message_, spec_.peer, p2p::MessageKind::kPointToPoint, tag, data_, spec_.bytes, element_);
    }
    return true;
  }

  Status mismatch(const collective::Message& message) override {
    return describeMismatch(*communicator_, message, {dtype(), static_cast<std::uint32_t>(spec_.tag), spec_.bytes, ""});
  }

  std::span<collective::Message> messages() override { return {&message_, 1}; }
  // Its owner's, until that is gone.
  std::shared_ptr<void> keepBuffers() override {
    if (self_ == nullptr || kept_.empty()) return nullptr;
    return std::make_shared<std::vector<std::shared_ptr<void>>>(std::exchange(kept_, {}));
  }

  void ending(const Status& status) override {
    flight_->end(flightNumber_, 1, status);
    if (status) [[likely]]
      return;
    communicator_->engine().defer([self = shared_from_this()] { self->flight_->fail(); });
  }

  // Its owner keeps it alive.
  void retain() override {}
  void release() override {}
  // Nothing to let go of is the rule, and then costs nothing. What there is is taken out here: once the transport is
  // let go of, the owner may be gone, or have started it again.
  void letGo() override {
    if (self_ == nullptr && kept_.empty()) return;
    communicator_->engine().defer([kept = std::exchange(kept_, {}), self = std::exchange(self_, nullptr)] {});
  }

 private:
  at::ScalarType dtype() const { return static_cast<at::ScalarType>(spec_.dtype); }

  // But for what each start has of its own.
  observe::FlightRecord describeForFlight(std::chrono::milliseconds timeout) const {
    observe::FlightRecord record = flight_->record(spec_.isSend ? "farandole:send" : "farandole:recv", timeout,
                                                   /*sequence=*/0, /*isPointToPoint=*/true);
    record.peer = static_cast<std::int16_t>(spec_.peer);
    const auto type = static_cast<std::uint8_t>(spec_.dtype);
    const std::array<std::int64_t, 1> sizes{static_cast<std::int64_t>(spec_.bytes / c10::elementSize(dtype()))};
    if (spec_.isSend) {
      record.addInput(type, sizes);
    } else {
      record.addOutput(type, sizes);
    }
    return record;
  }

  void record(std::uint64_t sequence) {
    flight_->renumber(record_, sequence, /*isPointToPoint=*/true);
    const bool isSent = isDone() && status().isOk();
    flightNumber_ = flight_->recorder().reserve(1);
    flight_->recorder().write(flightNumber_, record_, isSent ? FlightState::kCompleted : FlightState::kStarted);
    if (!isDone()) {
      wantEnding();
    } else if (!isSent) {
      ending(status());
    }
  }

  const RepeatedMessageSpec spec_;
  const std::uint32_t element_;
  const GroupFlight* const flight_;  // or it is not recorded
  observe::FlightRecord record_;
  std::uint64_t flightNumber_ = 0;
  collective::Message message_;
  void* data_ = nullptr;
  std::vector<std::shared_ptr<void>> kept_;
  std::shared_ptr<RepeatedOperation> self_;
};

class OwnedMessage final : public RepeatedMessage {
 public:
  OwnedMessage(std::shared_ptr<ProcessContext> context, std::shared_ptr<CallCounts> counts,
               std::shared_ptr<RepeatedOperation> operation)
      : context_(std::move(context)), counts_(std::move(counts)), operation_(std::move(operation)) {}

  ~OwnedMessage() override {
    if (!isStarted_) return;
    if (context_->isOurs()) {
      operation_->giveUp();
    } else {  // in a forked child: locks may be held by threads that do not exist here
      new std::shared_ptr<RepeatedOperation>(operation_);
    }
  }

  void start(void* data) override {
    if (isStarted_ && !operation_->status()) return;
    isStarted_ = true;
    operation_->startWith(data, *counts_);
  }

  Status wait() override {
    if (!isStarted_) return Status::ok();
    operation_->await();
    return operation_->status();
  }

  bool isDone() const override { return !isStarted_ || operation_->isDone(); }
  void keep(std::shared_ptr<void> buffer) override { operation_->keep(std::move(buffer)); }

 private:
  const std::shared_ptr<ProcessContext> context_;
  const std::shared_ptr<CallCounts> counts_;
  const std::shared_ptr<RepeatedOperation> operation_;
  bool isStarted_ = false;
};

Status check(const Communicator& communicator, const RepeatedMessageSpec& spec) {
  const auto refuse = [](const char* what, auto value, const std::string& expected) {
    return Status::invalidArgument("repeat: " + std::string(what) + " is " + std::to_string(value) + "; expected " +
                                   expected);
  };
  if (spec.peer < 0 || spec.peer >= communicator.size())
    return refuse("peer", spec.peer, "a rank from 0 to " + std::to_string(communicator.size() - 1));
  if (spec.tag < 0) return refuse("tag", spec.tag, "0 or more");
  constexpr int kDtypes = static_cast<int>(at::ScalarType::NumOptions);
  if (spec.dtype < 0 || spec.dtype >= kDtypes)
    return refuse("dtype", spec.dtype, "a ScalarType from 0 to " + std::to_string(kDtypes - 1));
  return Status::ok();
}

}  // namespace

Result<std::unique_ptr<RepeatedMessage>> makeRepeatedMessage(std::shared_ptr<ProcessContext> context,
                                                             std::shared_ptr<Communicator> communicator,
                                                             std::shared_ptr<CallCounts> counts,
                                                             const GroupFlight* flight,
                                                             std::chrono::milliseconds timeout,
                                                             const RepeatedMessageSpec& spec) {
  FARANDOLE_RETURN_IF_ERROR(check(*communicator, spec));
  auto operation = std::make_shared<RepeatedOperation>(std::move(communicator), timeout, flight, spec);
  return std::unique_ptr<RepeatedMessage>(
      std::make_unique<OwnedMessage>(std::move(context), std::move(counts), std::move(operation)));
}

}  // namespace farandole::backend
