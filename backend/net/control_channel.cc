#include "backend/net/control_channel.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/error.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/write.hpp>
#include <cassert>
#include <cerrno>
#include <utility>

#include "backend/net/fork_guard.h"
#include "backend/net/token_proof.h"
#include "backend/net/wire.h"

namespace farandole::net {
namespace {

using namespace std::chrono_literals;
using boost::asio::ip::tcp;
using boost::system::error_code;

constexpr std::size_t kMaxStrangerPayload = 1024;
constexpr std::size_t kMaxQueuedBytes = 16 << 20;  // for a peer that does not read
constexpr auto kHelloLimit = 5000ms;               // for an inbound connection to say who it is
constexpr auto kFarewellLimit = 100ms;             // for the other side to close after our Bye

void setOption(int descriptor, int level, int option, int value) {
  // Each is an improvement that some kernels lack; the connection works without.
  ::setsockopt(descriptor, level, option, &value, sizeof value);
}

void tuneSocket(int descriptor, std::chrono::milliseconds silence) {
  const int seconds = std::max(1, static_cast<int>(silence / 1s));
  setOption(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
  setOption(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
  setOption(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  setOption(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  setOption(descriptor, IPPROTO_TCP, TCP_KEEPCNT, seconds);
  setOption(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, seconds * 1000);
}

}  // namespace

ControlChannel::ControlChannel(EventLoop& loop, Owner& owner, const ControlTimes& times, std::uint64_t plane,
                               bool outbound)
    : loop_(loop),
      owner_(&owner),
      times_(times),
      plane_(plane),
      nonce_(randomNumber()),
      outbound_(outbound),
      socket_(loop.context()),
      timer_(loop.context()),
      reader_(kMaxStrangerPayload) {}

ControlChannel::~ControlChannel() { closeGuarded(socket_); }

ControlChannel::Ptr ControlChannel::accept(EventLoop& loop, Owner& owner, const ControlTimes& times,
                                           std::uint64_t plane, int descriptor) {
  auto channel = std::make_shared<ControlChannel>(loop, owner, times, plane, false);
  error_code ignored;
  channel->socket_.assign(tcp::v6(), descriptor, ignored);
  channel->after(kHelloLimit, [raw = channel.get()] { raw->finish(Status::timeout("said nothing")); });
  channel->startSession();
  return channel;
}

ControlChannel::Ptr ControlChannel::connect(EventLoop& loop, Owner& owner, const ControlTimes& times,
                                            std::uint64_t plane, const ControlAddress& target,
                                            std::string_view fromMachine) {
  auto channel = std::make_shared<ControlChannel>(loop, owner, times, plane, true);
  channel->remotePlane_ = target.plane;
  channel->port_ = target.port;
  channel->plan_.emplace(target.hostsFrom(fromMachine), times.silence, times.patience,
                         std::chrono::steady_clock::now());
  loop.post([channel] { channel->dialNext(); });
  return channel;
}

// One timer serves one purpose at a time; `handler` must not outlive the channel, so this holds it.
template <typename Handler>
void ControlChannel::after(std::chrono::milliseconds time, Handler handler) {
  timer_.expires_after(time);
  timer_.async_wait([self = shared_from_this(), use = ++timerUse_, handler](const error_code& error) {
    if (!error && use == self->timerUse_ && !self->closed_) handler();
  });
}

void ControlChannel::dialNext() {
  if (closed_) return;
  auto next = plan_->next(std::chrono::steady_clock::now());
  if (const auto* status = std::get_if<Status>(&next)) return finish(*status);
  const auto& attempt = std::get<DialPlan::Attempt>(next);
  if (attempt.pause == 0ms) return dial(attempt);
  after(attempt.pause, [this, attempt] { dial(attempt); });
}

void ControlChannel::dial(const DialPlan::Attempt& attempt) {
  host_ = attempt.host;
  error_code error;
  const auto address = boost::asio::ip::make_address(attempt.host, error);
  const tcp protocol = address.is_v6() ? tcp::v6() : tcp::v4();
  const int descriptor = error ? -1 : openGuarded(protocol.family());
  if (descriptor < 0) {
    const std::string why = error ? error.message() : error_code(errno, boost::system::system_category()).message();
    return loop_.post([self = shared_from_this(), why] { self->redial(DialPlan::Outcome::kOther, why); });
  }
  tuneSocket(descriptor, times_.silence);
  socket_.assign(protocol, descriptor, error);
  after(attempt.limit, [this] { redial(DialPlan::Outcome::kSilent, "no answer"); });
  socket_.async_connect({address, port_}, [self = shared_from_this(), session = session_](const error_code& failure) {
    if (self->closed_ || session != self->session_) return;
    if (failure) {
      const bool refused = failure == boost::asio::error::connection_refused;
      return self->redial(refused ? DialPlan::Outcome::kRefused : DialPlan::Outcome::kOther, failure.message());
    }
    self->plan_->connected();
    self->startSession();
  });
}

void ControlChannel::redial(DialPlan::Outcome outcome, const std::string& why) {
  if (closed_) return;
  ++session_;
  ++timerUse_;
  closeGuarded(socket_);
  reader_ = FrameReader(kMaxStrangerPayload);
  plan_->failed(outcome, why + " at " + host_ + " port " + std::to_string(port_));
  dialNext();
}

void ControlChannel::startSession() {
  tuneSocket(socket_.native_handle(), times_.silence);
  error_code ignored;
  socket_.non_blocking(true, ignored);
  // The acceptor speaks second: a stranger learns nothing by connecting.
  if (outbound_) {
    writes_.clear();
    queuedBytes_ = 0;
    send(FrameType::kHello, HelloMessage{plane_, nonce_}.encode());
  }
  readSome();
}

void ControlChannel::readSome() {
  socket_.async_read_some(boost::asio::buffer(buffer_),
                          [self = shared_from_this(), session = session_](const error_code& error, std::size_t bytes) {
                            if (self->closed_ || session != self->session_) return;
                            if (error) return self->handleEnd(error);
                            self->handleBytes({self->buffer_.data(), bytes});
                            if (!self->closed_ && session == self->session_) self->readSome();
                          });
}

void ControlChannel::handleBytes(std::string_view bytes) {
  const std::uint64_t session = session_;
  while (!bytes.empty() && !closed_ && session == session_) {
    if (ending_) return;  // only the end of the stream is waited for
    auto frame = reader_.take(bytes);
    if (!frame) {
      if (outbound_ && !open_) return redial(DialPlan::Outcome::kOther, frame.status().toString());
      return finish(frame.status());
    }
    if (*frame) handleFrame(**frame);
  }
}

void ControlChannel::handleFrame(const Frame& frame) {
  if (!open_) return handleHello(frame);
  if (frame.type == FrameType::kHello) return finish(Status::internal("a second hello"));
  if (frame.type == FrameType::kBye) return finish(Status::ok());
  if (owner_ != nullptr) owner_->channelReceived(shared_from_this(), frame);
}

void ControlChannel::handleHello(const Frame& frame) {
  const auto hello = frame.type == FrameType::kHello
                         ? HelloMessage::decode(frame.payload)
                         : Result<HelloMessage>(Status::internal("does not begin with a hello"));
  const bool expected = hello && hello->plane != plane_ && (!outbound_ || hello->plane == remotePlane_);
  if (!expected) {
    if (outbound_) return redial(DialPlan::Outcome::kOther, "another process answers");
    return finish(Status::internal("not a control plane of this job"));
  }
  remotePlane_ = hello->plane;
  remoteNonce_ = hello->nonce;
  open_ = true;
  ++timerUse_;
  timer_.cancel();
  if (!outbound_) {
    send(FrameType::kHello, HelloMessage{plane_, nonce_}.encode());
    after(times_.stranger, [this] { finish(Status::timeout("proved nothing")); });
  }
  if (owner_ != nullptr) owner_->channelOpened(shared_from_this());
}

std::string ControlChannel::proofText(bool ofInitiator, const std::string& group, int rank) const {
  const bool mine = ofInitiator == outbound_;
  return WireWriter()
      .number(static_cast<std::uint8_t>(ofInitiator ? 1 : 2))
      .number(outbound_ ? nonce_ : remoteNonce_)
      .number(outbound_ ? remoteNonce_ : nonce_)
      .number(mine ? plane_ : remotePlane_)
      .text(group)
      .number(rank)
      .take();
}

std::string ControlChannel::proof(std::string_view token, const std::string& group, int rank) const {
  return proofOf(token, proofText(outbound_, group, rank));
}

bool ControlChannel::verify(std::string_view token, const AttachMessage& attach) const {
  return equalInConstantTime(attach.proof, proofOf(token, proofText(!outbound_, attach.group, attach.rank)));
}

void ControlChannel::trust() {
  if (trusted_) return;
  trusted_ = true;
  reader_.allow(kMaxFramePayload);
  ++timerUse_;
  timer_.cancel();
}

void ControlChannel::send(FrameType type, std::string_view payload) {
  assert(loop_.inLoop());
  if (closed_ || ending_) return;
  writes_.push_back(encodeFrame(type, payload));
  queuedBytes_ += writes_.back().size();
  if (queuedBytes_ > kMaxQueuedBytes) {
    ending_ = true;
    loop_.post([self = shared_from_this()] {
      self->finish(Status(StatusCode::kPeerFailed, "it has stopped to read what it is told"));
    });
    return;
  }
  if (writes_.size() == 1) writeNext();
}

void ControlChannel::writeNext() {
  boost::asio::async_write(
      socket_, boost::asio::buffer(writes_.front()),
      [self = shared_from_this(), session = session_](const error_code& error, std::size_t /*bytes*/) {
        if (self->closed_ || session != self->session_) return;
        if (error) return self->handleEnd(error);
        self->queuedBytes_ -= self->writes_.front().size();
        self->writes_.pop_front();
        if (!self->writes_.empty()) return self->writeNext();
        if (self->ending_) self->endWriting();
      });
}

void ControlChannel::bye() {
  assert(loop_.inLoop());
  if (closed_ || ending_) return;
  if (!open_) {
    ending_ = true;
    return loop_.post([self = shared_from_this()] { self->finish(Status::ok()); });
  }
  send(FrameType::kBye, {});
  ending_ = true;
  after(kFarewellLimit, [this] { finish(Status::ok()); });
}

// Closing with bytes unread would reset the connection and could cost the
// other side our last words: so it is half closed, and read to its end.
void ControlChannel::endWriting() {
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
}

void ControlChannel::handleEnd(const error_code& error) {
  if (ending_) return finish(Status::ok());
  if (outbound_ && !open_) {
    return redial(DialPlan::Outcome::kOther, "the connection was closed before it was answered");
  }
  if (error == boost::asio::error::eof || error == boost::asio::error::connection_reset ||
      error == boost::asio::error::broken_pipe) {
    return finish(Status(StatusCode::kPeerFailed, "its process died without a farewell"));
  }
  finish(Status(StatusCode::kPeerFailed, "its host does not answer: " + error.message()));
}

void ControlChannel::close() {
  closed_ = true;
  ++timerUse_;
  timer_.cancel();
  closeGuarded(socket_);
}

void ControlChannel::finish(const Status& status) {
  if (closed_) return;
  const auto self = shared_from_this();
  close();
  if (Owner* const owner = std::exchange(owner_, nullptr)) owner->channelClosed(self, status);
}

void ControlChannel::abandon() {
  owner_ = nullptr;
  if (!closed_) close();
}

}  // namespace farandole::net
