#include "backend/c10d/work.h"

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/c10d/callback_threads.h"
#include "backend/c10d/contract.h"
#include "backend/c10d/errors.h"
#include "backend/c10d/flight_tensors.h"
#include "backend/c10d/gated_messages.h"
#include "backend/c10d/reduce_kernels.h"
#include "backend/c10d/timeouts.h"
#include "backend/common/deadline.h"

namespace farandole::backend {

::c10d::WorkResult resultOf(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk: return ::c10d::WorkResult::SUCCESS;
    case StatusCode::kTimeout: return ::c10d::WorkResult::TIMEOUT;
    case StatusCode::kPeerFailed: return ::c10d::WorkResult::COMM_ERROR;
    default: return ::c10d::WorkResult::UNKNOWN;
  }
}

void checkDuration(::c10d::OpType type, float milliseconds) {
  TORCH_CHECK(milliseconds >= 0, "farandole: ", ::c10d::opTypeToString(type),
              " has no duration: it is not done, or was started before enableCollectivesTiming");
}

template <typename Base>
WorkOf<Base>::WorkOf(std::shared_ptr<Communicator> communicator, WorkOptions options)
    : Work(options.rank, options.type),
      Base(std::move(communicator)),
      title_(options.title),
      sequence_(options.sequence),
      timeout_(options.timeout),
      onDone_(std::move(options.onDone)),
      isDoneAtOnce_(options.isDoneAtOnce),
      flight_(options.flight),
      key_(options.key) {
  Base::setTimeout(timeout_);
}

template <typename Base>
void WorkOf<Base>::launch() {
  // Asks this thread's copy of who listens; at::hasCallbacks() takes a lock.
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    range_ = std::make_unique<ProfiledRange>(std::move(*callbacks), title_, Base::results());
  }
  const bool isReported = onDone_ && !onDone_.hearsOfFailuresOnly();
  std::chrono::steady_clock::time_point started;
  if (isReported) started = std::chrono::steady_clock::now();
  {
    transport::ProgressEngine::Access access(Base::communicator_->engine());
    Base::start();
    // Now that it is under way, whoever waits for what it sends need not wait for this too.
    if (flight_ != nullptr) beginFlight();
    if (onDone_.hearsOfFailuresOnly()) awaitFailure();
  }
  if (Base::isDone()) endRange();
  if (!isReported) return;
  if (Base::isDone()) {
    report(started);
  } else {
    Base::whenDone([work = self(), started] { work->report(started); }, isDoneAtOnce_);
  }
}

template <typename Base>
void WorkOf<Base>::ending(const Status& status) {
  if (flight_ != nullptr) endFlight(status);
  if (!status && onDone_.hearsOfFailuresOnly()) tellFailure();
}

template <typename Base>
void WorkOf<Base>::awaitFailure() {
  if (!Base::isDone()) {
    Base::wantEnding();
  } else if (!Base::status()) {
    tellFailure();
  }
}

template <typename Base>
void WorkOf<Base>::tellFailure() {
  Base::communicator_->engine().defer([work = self()] { work->onDone_.tellFailure(); });
}

template <typename Base>
void WorkOf<Base>::beginFlight() {
  const bool isDone = Base::isDone();
  const bool isFailed = isDone && !Base::status();
  const auto state = isDone && !isFailed ? observe::FlightState::kCompleted : observe::FlightState::kStarted;
  observe::FlightRecord record = flight_->record(title_, timeout_, sequence_, Base::kIsPointToPoint);
  flightNumber_ = Base::recordFlight(flight_->recorder(), record, opType_, state);
  if (!isDone) {
    Base::wantEnding();
  } else if (isFailed || Base::foundPeer() != observe::FlightRecord::kNoPeer) {
    endFlight(Base::status());
  }
}

template <typename Base>
void WorkOf<Base>::endFlight(const Status& status) {
  if (const std::int16_t peer = Base::foundPeer(); peer != observe::FlightRecord::kNoPeer) {
    flight_->recorder().setPeer(flightNumber_, peer);
  }
  flight_->end(flightNumber_, Base::numFlightEntries(), status);
  if (status) return;
  Base::communicator_->engine().defer([work = self()] { work->flight_->fail(); });
}

template <typename Base>
void WorkOf<Base>::report(std::chrono::steady_clock::time_point started) {
  const WorkReport report{retrieveOpType(), sequence_, Base::keys(key_),
                          isSuccess(),      started,   std::chrono::steady_clock::now()};
  duration_ = report.duration().count();
  onDone_(report);
}

template <typename Base>
float WorkOf<Base>::getDuration() const {
  const float duration = duration_;
  checkDuration(opType_, duration);
  return duration;
}

template <typename Base>
bool WorkOf<Base>::isCompleted() {
  Base::want();
  if (!Base::isDone()) return false;
  endRange();
  return true;
}

template <typename Base>
bool WorkOf<Base>::isSuccess() const {
  if (!Base::isDone()) return false;
  endRange();
  return Base::status().isOk();
}

template <typename Base>
std::exception_ptr WorkOf<Base>::exception() const {
  return Base::isDone() ? exceptionOf(Base::status()) : nullptr;
}

template <typename Base>
bool WorkOf<Base>::wait(milliseconds timeout) {
  checkOwnTimeout("wait", timeout);
  if (!Base::isDone()) {
    TORCH_CHECK(ForkCount::now() == forks_, title_,
                ": wait() in a process that was forked from the one that began it; expected it there");
    const bool isOwn = isUnset(timeout);
    const auto deadline = isOwn ? Base::deadline() : std::min(Base::deadline(), deadlineIn(timeout));
    if (!Base::wait(deadline)) {
      const bool isLast = isOwn || deadline == Base::deadline();
      if (isLast || Base::kIsPointToPoint) {
        Base::communicator_->timeOut(*this, isLast ? timeout_ : timeout);
      } else {
        // The other ranks may wait for what this one has begun: it ends by its own timeout only.
        Base::want();
        throwIfError(Base::communicator_->latenessOf(*this, timeout));
      }
    }
  }
  endRange();
  if (hasFuture_) {  // who has waited for the work finds its future complete
    completeFuture();
    while (!future_->completed()) std::this_thread::yield();
  }
  throwIfError(Base::status());
  return true;
}

template <typename Base>
void WorkOf<Base>::abort() {
  transport::ProgressEngine::Access access(Base::communicator_->engine());
  Base::fail(Status::aborted("Work.abort() was called"));
}

template <typename Base>
c10::intrusive_ptr<c10::ivalue::Future> WorkOf<Base>::getFuture() {
  endRange();  // who waits for a future is not seen here
  std::lock_guard lock(futureMutex_);
  if (future_ == nullptr) {
    // It wants to know where its value lies, unless that is the CPU.
    std::vector<c10::Device> devices;
    for (const at::Tensor& tensor : Base::results()) {
      if (devices.empty() && !tensor.device().is_cpu()) devices.push_back(tensor.device());
    }
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
    hasFuture_ = true;
    if (Base::isDone()) {
      completeFuture();  // nothing is chained to it yet
    } else {
      Base::whenDone([work = self()] { runOnCallbackThread([work] { work->completeFuture(); }); });
    }
  }
  return future_;
}

template <typename Base>
void WorkOf<Base>::completeFuture() {
  if (isFutureComplete_.exchange(true)) return;
  if (std::exception_ptr error = exception()) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(result()));
  }
}

template <typename Base>
c10::intrusive_ptr<c10::ivalue::Future> WorkOf<Base>::getFutureResult() {
  std::lock_guard lock(futureMutex_);
  if (futureResult_ == nullptr) {
    futureResult_ = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    const auto complete = [](WorkOf& work, c10::ivalue::Future& future) {
      future.markCompleted(static_cast<std::int64_t>(resultOf(work.Base::status())));
    };
    if (Base::isDone()) {
      complete(*this, *futureResult_);
    } else {
      Base::whenDone([work = self(), future = futureResult_, complete] {
        runOnCallbackThread([work, future, complete] { complete(*work, *future); });
      });
    }
  }
  return futureResult_;
}

template class WorkOf<MessagesOperation>;
template class WorkOf<GatedMessages>;
template class WorkOf<CollectiveOperation>;

std::string MessagesOperation::describe() const {
  const Item& first = items_[0];
  std::string text = first.isSend ? "send to " : "recv from ";
  text += first.isSend || first.peer != collective::kAnySource ? communicator_->describe(first.peer) : "any rank";
  text += " (tag " + std::to_string(first.tag) + ", " + std::to_string(first.tensor.nbytes()) + " bytes";
  if (items_.size() > 1) text += ", first of " + std::to_string(items_.size()) + " operations with this peer";
  if (!label_.empty()) text += ", batch '" + label_ + "'";
  text += ")";
  // A timeout, say, comes before the rest of the batch is done.
  if (!contradiction_) text += ", in which " + std::string(contradiction_.message());
  return text;
}

c10::SmallVector<std::uint64_t, 1> MessagesOperation::keys(std::uint64_t own) const {
  if (items_[0].key == 0) return {own};
  c10::SmallVector<std::uint64_t, 1> keys;
  for (const Item& item : items_) keys.push_back(item.key);
  return keys;
}

std::vector<at::Tensor> MessagesOperation::results() const {
  std::vector<at::Tensor> received;
  for (const Item& item : items_) {
    if (!item.isSend) received.push_back(item.tensor);
  }
  return received;
}

bool MessagesOperation::postNext() {
  if (posted_ > 0) {
    if (!contradiction_) fail(takeContradictions());
    return false;
  }
  messages_.resize(items_.size());
  if (items_.size() == 1) {
    post(items_[0]);
    return !contradiction_;
  }
  // Receives first: what arrives then has a place to go to.
  for (const bool isSend : {false, true}) {
    for (const Item& item : items_) {
      if (item.isSend == isSend && !isDone()) post(item);
    }
  }
  return !contradiction_;
}

void MessagesOperation::post(const Item& item) {
  collective::Message& message = messages_[posted_++];
  void* const data = item.tensor.data_ptr();
  const auto bytes = static_cast<std::size_t>(item.tensor.numel()) * item.tensor.itemsize();
  const std::uint32_t element = elementOf(item.tensor.scalar_type());
  if (item.isSend) {
    postSend(message, item.peer, p2p::MessageKind::kPointToPoint, item.tag, data, bytes, element);
  } else {
    postRecv(message, item.peer, p2p::MessageKind::kPointToPoint, item.tag, data, bytes, element);
  }
}

// In the order in which they were posted.
const MessagesOperation::Item& MessagesOperation::itemOf(const collective::Message& message) const {
  auto before = &message - messages_.data();
  for (const bool isSend : {false, true}) {
    for (const Item& item : items_) {
      if (item.isSend == isSend && before-- == 0) return item;
    }
  }
  TORCH_INTERNAL_ASSERT(false, "a message that was not posted");
}

// The others of a batch go on: their peers are sending and receiving them.
Status MessagesOperation::mismatch(const collective::Message& message) {
  if (!contradiction_) {
    ++moreContradictions_;
    return Status::ok();
  }
  const Item& item = itemOf(message);
  const Posted posted{item.tensor.scalar_type(), item.tag, item.tensor.nbytes(),
                      ", shape " + c10::str(item.tensor.sizes())};
  contradiction_ = describeMismatch(*communicator_, message, posted);
  return Status::ok();
}

Status MessagesOperation::takeContradictions() {
  Status first = std::exchange(contradiction_, Status::ok());
  if (moreContradictions_ == 0) return first;
  return Status::invalidArgument(std::string(first.message()) + "; " + std::to_string(moreContradictions_) +
                                 " more messages of the batch differ");
}

std::uint64_t MessagesOperation::recordFlight(observe::FlightRecorder& recorder, observe::FlightRecord& record,
                                              ::c10d::OpType, observe::FlightState state) const {
  const std::uint64_t first = recorder.reserve(items_.size());
  for (std::size_t i = 0; i < items_.size(); ++i) {
    if (i > 0) record.advance();
    record.peer = static_cast<std::int16_t>(items_[i].peer);
    recordMessage(record, items_[i].tensor, items_[i].isSend);
    recorder.write(first + i, record, state);
  }
  return first;
}

std::uint64_t CollectiveOperation::recordFlight(observe::FlightRecorder& recorder, observe::FlightRecord& record,
                                                ::c10d::OpType type, observe::FlightState state) const {
  recordTensors(record, type, results_, others_);
  const std::uint64_t number = recorder.reserve(1);
  recorder.write(number, record, state);
  return number;
}

std::shared_ptr<void> CollectiveOperation::keepBuffers() {
  struct Buffers {
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> others;
    std::vector<collective::BufferPool::Buffer> scratch;
  };
  return std::make_shared<Buffers>(Buffers{results_, others_, takeScratch()});
}

std::string CollectiveOperation::describeReduction(std::uint16_t code) const {
  return backend::describeReduction(code);
}

std::string CollectiveWork::describe() const {
  return ::c10d::opTypeToString(opType_) + " number " + std::to_string(getSequencenumber()) + " on " +
         communicator_->nameOf(rank_);
}

}  // namespace farandole::backend
