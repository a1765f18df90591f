#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "backend/common/status.h"
#include "backend/net/control_address.h"
#include "backend/net/control_messages.h"
#include "backend/net/dial_plan.h"
#include "backend/net/event_loop.h"
#include "backend/net/frame.h"

namespace farandole::net {

// How long a control plane waits for what.
struct ControlTimes {
  std::chrono::milliseconds silence{5000};    // of a host (its kernel), before it counts as vanished; whole seconds
  std::chrono::milliseconds patience{30000};  // for a process that takes connections and does not answer
  std::chrono::milliseconds stranger{60000};  // that has not proved itself, before it is dropped
  std::chrono::milliseconds grace{600};       // between "cannot be reached" and "failed": others may know better
  std::chrono::milliseconds handover{1000};   // for a leaver, to find one who stays
};

// One TCP connection between the control planes of two processes, with an end
// in order (Bye) and one without: then the process at the other end died. A
// vanished host is found by the kernel's keep-alive; nothing here wakes up while
// nothing happens. Both sides open with Hello; what one says later about a group
// is believed after a proof that it knows the group's token. Everything runs on
// the loop; handlers keep the channel alive, the owner is told once that it closed.
class ControlChannel : public std::enable_shared_from_this<ControlChannel> {
 public:
  using Ptr = std::shared_ptr<ControlChannel>;
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void channelOpened(const Ptr& channel) = 0;
    virtual void channelReceived(const Ptr& channel, const Frame& frame) = 0;
    // Ok after a Bye; kPeerFailed when the process or its host is gone; else it was never opened or broke the protocol.
    virtual void channelClosed(const Ptr& channel, const Status& status) = 0;
  };

  // `descriptor` from acceptGuarded().
  static Ptr accept(EventLoop& loop, Owner& owner, const ControlTimes& times, std::uint64_t plane, int descriptor);
  static Ptr connect(EventLoop& loop, Owner& owner, const ControlTimes& times, std::uint64_t plane,
                     const ControlAddress& target, std::string_view fromMachine);

  ControlChannel(EventLoop& loop, Owner& owner, const ControlTimes& times, std::uint64_t plane, bool outbound);
  ~ControlChannel();

  std::uint64_t remotePlane() const { return remotePlane_; }  // of an inbound one: as it claims
  bool isOutbound() const { return outbound_; }
  bool isOpen() const { return open_ && !ending_ && !closed_; }
  bool isEnding() const { return ending_ || closed_; }
  bool wasOpened() const { return open_; }

  // Proofs hold for one direction of one connection, one group and one rank.
  std::string proof(std::string_view token, const std::string& group, int rank) const;
  bool verify(std::string_view token, const AttachMessage& attach) const;
  // The other side has proved itself: it may send more, and stay.
  void trust();
  bool isTrusted() const { return trusted_; }

  void send(FrameType type, std::string_view payload);
  // Ends it in order: what was sent still arrives. The owner is told when it is over.
  void bye();
  // Ends it at once, without a word to either side.
  void abandon();
  // Ends it at once, and tells the owner so.
  void finish(const Status& status);

 private:
  std::string proofText(bool ofInitiator, const std::string& group, int rank) const;
  void dialNext();
  void dial(const DialPlan::Attempt& attempt);
  void redial(DialPlan::Outcome outcome, const std::string& why);
  void startSession();
  void readSome();
  void handleBytes(std::string_view bytes);
  void handleFrame(const Frame& frame);
  void handleHello(const Frame& frame);
  void writeNext();
  void endWriting();
  void handleEnd(const boost::system::error_code& error);
  void close();
  template <typename Handler>
  void after(std::chrono::milliseconds time, Handler handler);

  EventLoop& loop_;
  Owner* owner_;  // null once told, or abandoned
  const ControlTimes times_;
  const std::uint64_t plane_;
  const std::uint64_t nonce_;
  const bool outbound_;
  std::uint64_t remotePlane_ = 0;
  std::uint64_t remoteNonce_ = 0;
  std::uint16_t port_ = 0;
  std::optional<DialPlan> plan_;
  std::string host_;

  boost::asio::ip::tcp::socket socket_;
  boost::asio::steady_timer timer_;
  std::uint64_t timerUse_ = 0;
  std::uint64_t session_ = 0;  // counts sockets: late handlers of an earlier one are ignored
  std::array<char, 4096> buffer_{};
  FrameReader reader_;
  std::deque<std::string> writes_;
  std::size_t queuedBytes_ = 0;
  bool open_ = false;
  bool trusted_ = false;
  bool ending_ = false;  // Bye was queued
  bool closed_ = false;
};

}  // namespace farandole::net
