#include "backend/collective/operation.h"

#include "backend/collective/communicator.h"
#include "backend/common/deadline.h"
#include "backend/transport/coarse_clock.h"

namespace farandole::collective {
namespace {

// Ticks of the kernel do not matter for a second or more.
transport::Clock::time_point nowFor(std::chrono::milliseconds timeout) {
  return timeout >= std::chrono::seconds(1) ? transport::coarseNow() : transport::Clock::now();
}

}  // namespace

void Operation::start() {
  if (const Status& usable = communicator_->usable(); !usable) {
    complete(usable.wrap(describe()));
    return;
  }
  run();
  if (outstanding_ > 0 || (isBlocked() && !isDone())) {
    registered_ = true;
    // What is done at once, as most sends are, never looks at the clock.
    deadline_ = deadlineAfter(nowFor(timeout_), timeout_);
    retain();
    communicator_->add(*this);
    isCounted_ = !isPolled();
    isCounted_ ? communicator_->engine().notePending() : communicator_->engine().notePolled();
    if (goesOnUnattended_) communicator_->engine().noteUnattended();
  }
}

bool Operation::wait(transport::Clock::time_point deadline) { return communicator_->engine().wait(done_, deadline); }

void Operation::run() {
  do {
    // One more than is posted: what completes at once must not end the round.
    ++outstanding_;
    awaited_ = nullptr;
    const bool more = !isDone() && !isLost_ && postNext();
    --outstanding_;
    if (!more || hasPostedAll_) {
      if (outstanding_ == 0) settle();
      return;
    }
  } while (outstanding_ == 0 && !isBlocked());
  if (outstanding_ == 0 && registered_ && (isDone() || !isBlocked())) unregister();
}

void Operation::settle() {
  if (!isDone()) noteDone();
  if (registered_) unregister();
}

void Operation::unregister() {
  registered_ = false;
  communicator_->remove(*this);
  if (isCounted_) communicator_->engine().noteSettled();
  letGo();
}

void Operation::resume() {
  if (!registered_ || isDone()) return;
  communicator_->engine().notePosted();
  run();
}

void Operation::letGo() { communicator_->engine().addLeaver(*this); }

void Operation::complete(Status status) {
  status_ = std::move(status);
  noteDone();
}

void Operation::noteDone() {
  if (wantsEnding_) ending(status_);
  done_.store(true, std::memory_order_release);
  transport::ProgressEngine& engine = communicator_->engine();
  engine.noteCompletion();
  if (callbacks_.empty()) [[likely]]
    return;
  for (auto& callback : callbacks_) engine.defer(std::move(callback));
  callbacks_.clear();
}

void Operation::fail(const Status& status) {
  if (isDone()) return;
  abandoning(status);
  complete(status.wrap(describe()));
  abandoned(status);
  // Cancelling may complete messages at once: the last of them must not end this object here.
  ++outstanding_;
  for (Message& message : messages()) {
    if (message.isPending) communicator_->engine().transport().cancel(message);
  }
  --outstanding_;
  if (outstanding_ == 0 && registered_) run();
}

void Operation::whenDone(std::function<void()> callback, bool atOnce) {
  {
    transport::ProgressEngine::Access access(communicator_->engine());
    if (!isDone()) {
      callbacks_.push_back(std::move(callback));
      if (atOnce) {
        isWanted_.store(true, std::memory_order_relaxed);
        communicator_->engine().notePolled();
      }
      return;
    }
  }
  callback();
}

void Operation::want() {
  if (isDone() || isWanted_.load(std::memory_order_relaxed)) return;
  transport::ProgressEngine::Access access(communicator_->engine());
  isWanted_.store(true, std::memory_order_relaxed);
  communicator_->engine().notePolled();
}

void Operation::postSend(Message& message, int peer, p2p::MessageKind kind, std::uint32_t tag, const void* data,
                         std::size_t bytes, std::uint32_t element) {
  message.operation = this;
  message.onDone = &Operation::messageDone;
  message.keep = nullptr;
  message.peer = peer;
  message.isSend = true;
  message.isPending = true;
  message.expectedBytes = bytes;
  ++outstanding_;
  communicator_->send(peer, kind, tag, element, data, bytes, message);
}

void Operation::postRecv(Message& message, int peer, p2p::MessageKind kind, std::uint32_t tag, void* data,
                         std::size_t bytes, std::uint32_t element) {
  message.operation = this;
  message.onDone = &Operation::messageDone;
  message.keep = &Operation::keepBuffersOf;
  message.peer = peer;
  message.isSend = false;
  message.isPending = true;
  message.expectedBytes = bytes;
  ++outstanding_;
  communicator_->recv(peer, kind, tag, element, data, bytes, message);
}

void Operation::messageDone(transport::Request& request) {
  auto& message = static_cast<Message&>(request);
  message.operation->noteMessage(message);
}

std::shared_ptr<void> Operation::keepBuffersOf(transport::Request& request) {
  return static_cast<Message&>(request).operation->keepBuffers();
}

void Operation::noteMessage(Message& message) {
  message.isPending = false;
  if (message.status) [[likely]] {
    if (!message.isSend) {
      const int source = p2p::sourceOf(message.tag);
      if (message.peer == kAnySource) communicator_->noteReceived(source, message.bytes);
      message.peer = source;
    }
  } else if (!isDone()) {
    noteFailed(message);
  }
  // Counted last: a failure above must not end this object under our feet.
  --outstanding_;
  if (outstanding_ == 0 && hasPostedAll_) {
    settle();
  } else if (outstanding_ == 0 || &message == awaited_) {
    run();
  }
}

void Operation::noteFailed(Message& message) {
  const StatusCode code = message.status.code();
  if (code == StatusCode::kMismatch) {
    if (!message.isSend) message.peer = p2p::sourceOf(message.tag);
    if (const Status status = mismatch(message); !status) fail(status);
    return;
  }
  // Begun to be received from whoever it was.
  if (!message.isSend && message.peer == kAnySource && message.tag != p2p::kNoTag) {
    message.peer = p2p::sourceOf(message.tag);
  }
  communicator_->noteLost(message.peer);
  const Status why =
      code == StatusCode::kPeerLeft ? communicator_->whyClosed(message.peer, message.status) : message.status;
  const Status status =
      why.wrap((message.isSend ? "sending to " : "receiving from ") + communicator_->describe(message.peer));
  // Nobody here has cancelled a message of what is not done: UCX does when a connection breaks.
  if (code == StatusCode::kPeerFailed || code == StatusCode::kPeerLeft || code == StatusCode::kAborted) {
    communicator_->failForLoss(*this, message.peer, status);
  } else {
    fail(status);
  }
}

Status Operation::mismatch(const Message& message) {
  return sizesDiffer(message.isSend, communicator_->describe(message.peer), message.bytes, message.expectedBytes);
}

Status Operation::sizesDiffer(bool isSend, const std::string& peer, std::size_t theirs, std::size_t ours) {
  const std::string here = std::to_string(ours);
  const std::string there = std::to_string(theirs);
  return Status::invalidArgument(isSend ? peer + " has a buffer of " + there + " bytes for the " + here +
                                              " bytes sent from here"
                                        : peer + " sent " + there + " bytes, the buffer here has " + here);
}

}  // namespace farandole::collective
