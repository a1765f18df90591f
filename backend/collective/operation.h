#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/p2p/message_tag.h"
#include "backend/transport/progress_engine.h"

namespace farandole::collective {

class Communicator;
class Operation;

inline constexpr int kAnySource = -1;

// One message of an Operation.
struct Message : transport::Request {
  Operation* operation = nullptr;
  std::size_t expectedBytes = 0;
  int peer = kAnySource;
  bool isSend = false;
  bool isPending = false;
};

// Something that a communicator does asynchronously, and that completes exactly
// once: when its messages have, or early with an error (timeout, abort, dead
// peer). After an early end the object and its buffers stay until the transport
// has let go of them.
//
// Thread: start() and everything protected with the transport held; the rest any.
class Operation : private transport::ProgressEngine::Leaver {
 public:
  ~Operation() override = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Posts the first messages. Once; again only after rearm().
  void start();
  // Blocks; false when `deadline` came first. The operation then goes on.
  bool wait(transport::Clock::time_point deadline);

  bool isDone() const { return done_.load(std::memory_order_acquire); }
  // Valid once done.
  const Status& status() const { return status_; }

  // Ends it with an error, unless it is done. With the transport held.
  void fail(const Status& status);
  // Runs once it is done, on the thread that completes it or on this one, with nothing held.
  // Not `atOnce`: maybe some time later, where no thread waits for it.
  void whenDone(std::function<void()> callback, bool atOnce = true);

  // Before start(): how long it may take. It ends with an error some time after.
  void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  // It is asked for: it has to go on though no thread waits. Nothing held.
  void want();
  // Before start(): it is to go on though no thread may wait for it for long.
  void goOnUnattended() { goesOnUnattended_ = true; }
  // Valid while it is pending.
  transport::Clock::time_point deadline() const { return deadline_; }

 protected:
  explicit Operation(std::shared_ptr<Communicator> communicator) : communicator_(std::move(communicator)) {}

  // Whether nobody waits for it: it is in flight for as long as the group.
  virtual bool isBackground() const { return false; }
  // What it is, for errors: "recv from rank 1 (tag 0, 8 bytes)".
  virtual std::string describe() const = 0;
  // What else helps where it is not done, for people: " (the last calls are ...)"; or nothing.
  virtual std::string circumstances() const { return {}; }
  // Posts what comes next; returns false when nothing is left to do. Called when
  // all that was posted has completed.
  virtual bool postNext() = 0;
  // For postNext(), which then returns true: it has posted all there is, and is not called again.
  void notePostedAll() { hasPostedAll_ = true; }
  // For postNext(), which then returns true: it is called again as soon as this message is done.
  void await(const Message& message) { awaited_ = &message; }
  // Whether it waits, after postNext() returned true, for something other than messages.
  virtual bool isBlocked() const { return false; }
  // Whether that is all that it waits for, ever: a poller goes on with it.
  virtual bool isPolled() const { return false; }
  // Whether somebody has to hear of its end who does not wait for it.
  bool isWanted() const { return isWanted_.load(std::memory_order_relaxed); }
  bool hasMessagesOut() const { return outstanding_ > 0; }
  // The ranks that keep it from going on, for errors: "rank 1 (host a, pid 7)"; or nothing.
  virtual std::string missingRanks() const { return {}; }
  // It is about to be done, with this status. Called after wantEnding() only.
  virtual void ending(const Status&) {}
  void wantEnding() { wantsEnding_ = true; }
  // It is about to be ended early by an error, and who waits does not know it yet.
  virtual void abandoning(const Status&) {}
  // It was ended early by an error.
  virtual void abandoned(const Status&) {}
  virtual std::span<Message> messages() = 0;
  // What its receives write to, once it was ended early: held for whoever may still write there when this object is
  // gone. Null where that is not known; then this object stays.
  virtual std::shared_ptr<void> keepBuffers() { return nullptr; }
  // Keep this object alive, and let go of it. The latter may free tensors and, with the last
  // operation, the communicator: not with the transport held.
  virtual void retain() = 0;
  virtual void release() = 0;
  // Has release() called once the transport is let go of. In another way where it may be started again by then.
  virtual void letGo();

  // For one that is started again, when it is done and was in order.
  void rearm() {
    done_.store(false, std::memory_order_relaxed);
    isWanted_.store(false, std::memory_order_relaxed);
    wantsEnding_ = hasPostedAll_ = false;
    waitsSince_ = 0;
  }
  // What isBlocked() held up goes on, unless it is done.
  void resume();
  // Whether the transport may still use its buffers, or call it.
  bool isInFlight() const { return registered_ || outstanding_ > 0; }

  // `element`: what the message is made of, which both sides must agree on (p2p/message_tag.h).
  void postSend(Message& message, int peer, p2p::MessageKind kind, std::uint32_t tag, const void* data,
                std::size_t bytes, std::uint32_t element = 0);
  void postRecv(Message& message, int peer, p2p::MessageKind kind, std::uint32_t tag, void* data, std::size_t bytes,
                std::uint32_t element = 0);
  // The error where `peer` sends or wants `theirs` bytes, and this side the other number.
  static Status sizesDiffer(bool isSend, const std::string& peer, std::size_t theirs, std::size_t ours);
  // The other side's message is another than this one: what ends the operation, or ok when it goes on.
  virtual Status mismatch(const Message& message);

  const std::shared_ptr<Communicator> communicator_;

 private:
  friend class Communicator;

  void leave() final { release(); }
  static void messageDone(transport::Request& request);
  static std::shared_ptr<void> keepBuffersOf(transport::Request& request);
  void noteMessage(Message& message);
  void noteFailed(Message& message);
  void run();
  void complete(Status status);
  void noteDone();
  // All its messages are, and nothing is left to post.
  void settle();
  void unregister();

  std::atomic<bool> done_{false};
  std::atomic<bool> isWanted_{false};
  bool registered_ = false;
  bool isCounted_ = false;  // as pending, by the engine
  bool wantsEnding_ = false;
  bool goesOnUnattended_ = false;
  bool hasPostedAll_ = false;
  bool isLost_ = false;  // a message did not come, and it will fail for that: nothing is built on what came instead
  int outstanding_ = 0;
  int waitsSince_ = 0;  // the communicator's look at which it was seen to wait for a rank that has left, or 0
  const Message* awaited_ = nullptr;
  std::chrono::milliseconds timeout_ = std::chrono::milliseconds::max();
  transport::Clock::time_point deadline_ = transport::kNoDeadline;
  Status status_;
  std::vector<std::function<void()>> callbacks_;
  // In the communicator's list while messages are outstanding.
  Operation* previous_ = nullptr;
  Operation* next_ = nullptr;
};

}  // namespace farandole::collective
