#include "backend/net/control_plane_impl.h"

#include <algorithm>
#include <boost/asio/error.hpp>
#include <cerrno>
#include <utility>

#include "backend/net/fork_guard.h"

namespace farandole::net {
namespace {

using namespace std::chrono_literals;
using boost::asio::ip::tcp;
using boost::system::error_code;

// Connections that have not proved themselves. Who belongs here does that at once: the oldest one makes room.
constexpr std::size_t kMaxStrangers = 256;
constexpr std::size_t kMaxEarly = 64;  // groups that one connection may attach to before we join them
constexpr std::size_t kMaxEarlyStranger = 16;
constexpr std::size_t kMaxGraves = 256;
constexpr auto kAcceptPause = 100ms;  // when the process is out of descriptors
constexpr auto kHandoverLimit = 110ms;
constexpr auto kFarewellLimit = 50ms;

}  // namespace

ControlPlane::Impl::Impl(EventLoop& loop, const ControlTimes& times, ListeningSocket listening)
    : loop_(loop),
      times_(times),
      address_(std::move(listening.address)),
      acceptor_(loop.context()),
      acceptTimer_(loop.context()),
      shutDownTimer_(loop.context()) {
  error_code ignored;
  acceptor_.assign(tcp::v6(), listening.descriptor, ignored);
  acceptor_.non_blocking(true, ignored);
}

std::shared_ptr<ControlGroup> ControlPlane::Impl::makeGroup(std::string key, int rank,
                                                            std::vector<ControlGroup::Member> members,
                                                            std::string token,
                                                            std::weak_ptr<ControlListener> listener) {
  return std::make_shared<ControlGroup>(loop_, static_cast<ControlGroup::Plane&>(*this), times_, std::move(key), rank,
                                        std::move(members), std::move(token), std::move(listener));
}

void ControlPlane::Impl::start() { waitForConnection(); }

void ControlPlane::Impl::waitForConnection() {
  acceptor_.async_wait(tcp::acceptor::wait_read, [self = shared_from_this()](const error_code& error) {
    if (error || self->closed_) return;
    self->acceptAll();
  });
}

void ControlPlane::Impl::acceptAll() {
  while (true) {
    const int descriptor = acceptGuarded(acceptor_.native_handle());
    if (descriptor < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (descriptor < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) {
      acceptTimer_.expires_after(kAcceptPause);
      return acceptTimer_.async_wait([self = shared_from_this()](const error_code& error) {
        if (!error && !self->closed_) self->waitForConnection();
      });
    }
    if (descriptor < 0) return waitForConnection();
    const auto channel = ControlChannel::accept(loop_, *this, times_, address_.plane, descriptor);
    makeRoomForStranger();
    channels_.insert(channel);
    strangers_.push_back(channel);
  }
}

void ControlPlane::Impl::makeRoomForStranger() {
  std::erase_if(strangers_, [](const std::weak_ptr<ControlChannel>& one) {
    const auto channel = one.lock();
    return channel == nullptr || channel->isTrusted() || channel->isEnding();
  });
  if (strangers_.size() < kMaxStrangers) return;
  const auto oldest = strangers_.front().lock();
  strangers_.pop_front();
  oldest->finish(Status::unavailable("too many connections have proved nothing"));
}

std::shared_ptr<ControlGroup> ControlPlane::Impl::find(const std::string& key) const {
  const auto found = groups_.find(key);
  return found == groups_.end() ? nullptr : found->second;
}

void ControlPlane::Impl::join(const std::shared_ptr<ControlGroup>& group) {
  if (closed_) return group->drop();
  groups_[group->key()] = group;
  std::vector<Early> early;
  for (auto it = early_.begin(); it != early_.end();) {
    if (it->message.group == group->key()) {
      early.push_back(std::move(*it));
      it = early_.erase(it);
    } else {
      ++it;
    }
  }
  for (const Early& entry : early) {
    if (entry.channel->isEnding()) continue;
    if (const Status status = group->attach(entry.channel, entry.message); !status.isOk()) {
      entry.channel->finish(status);
    }
  }
  group->join();
}

ControlChannel::Ptr ControlPlane::Impl::channelTo(const ControlAddress& address) {
  for (const ControlChannel::Ptr& channel : channels_) {
    const bool vouched = channel->isOutbound() || channel->isTrusted();
    if (channel->remotePlane() == address.plane && vouched && !channel->isEnding()) return channel;
  }
  auto channel = ControlChannel::connect(loop_, *this, times_, address_.plane, address, address_.machine);
  channels_.insert(channel);
  return channel;
}

bool ControlPlane::Impl::isUsed(const ControlChannel& channel) const {
  return std::any_of(groups_.begin(), groups_.end(), [&](const auto& entry) { return entry.second->uses(channel); }) ||
         std::any_of(early_.begin(), early_.end(), [&](const Early& entry) { return entry.channel.get() == &channel; });
}

void ControlPlane::Impl::released(const ControlChannel::Ptr& channel) {
  if (!isUsed(*channel)) channel->bye();
}

void ControlPlane::Impl::settled() {
  for (const auto& [key, group] : groups_) {
    const bool buried = std::find(graves_.begin(), graves_.end(), key) != graves_.end();
    if (group->isSettled() && !buried) graves_.push_back(key);
  }
  loop_.post([self = shared_from_this()] {
    while (self->graves_.size() > kMaxGraves) {
      self->groups_.erase(self->graves_.front());
      self->graves_.pop_front();
    }
    if (self->shutDownDone_) self->finishShutDown();
  });
}

void ControlPlane::Impl::channelOpened(const ControlChannel::Ptr& channel) {
  const auto groups = groups_;
  for (const auto& [key, group] : groups) group->channelOpened(channel);
}

void ControlPlane::Impl::channelClosed(const ControlChannel::Ptr& channel, const Status& status) {
  channels_.erase(channel);
  early_.erase(
      std::remove_if(early_.begin(), early_.end(), [&](const Early& entry) { return entry.channel == channel; }),
      early_.end());
  const auto groups = groups_;
  for (const auto& [key, group] : groups) group->channelClosed(channel, status);
  if (shutDownDone_) finishShutDown();
}

void ControlPlane::Impl::channelReceived(const ControlChannel::Ptr& channel, const Frame& frame) {
  if (const Status status = handle(channel, frame); !status.isOk()) channel->finish(status);
}

Status ControlPlane::Impl::handle(const ControlChannel::Ptr& channel, const Frame& frame) {
  if (frame.type == FrameType::kAttach) {
    auto message = AttachMessage::decode(frame.payload);
    return message ? handleAttach(channel, std::move(*message)) : message.status();
  }
  if (!channel->isTrusted()) return Status::internal("speaks before it has proved itself");
  switch (frame.type) {
    case FrameType::kFacts: {
      const auto message = FactsMessage::decode(frame.payload);
      if (!message) return message.status();
      if (const auto group = find((*message).group)) group->facts(channel, *message);
      return Status::ok();
    }
    case FrameType::kHanded: {
      const auto message = HandedMessage::decode(frame.payload);
      if (!message) return message.status();
      if (const auto group = find((*message).group)) group->handed();
      return Status::ok();
    }
    case FrameType::kAsk: {
      const auto message = AskMessage::decode(frame.payload);
      if (!message) return message.status();
      if (const auto group = find((*message).group)) {
        if (group->uses(*channel) && !group->isLeaving()) group->query().question(channel, *message);
      }
      return Status::ok();
    }
    case FrameType::kAnswer: {
      const auto message = AnswerMessage::decode(frame.payload);
      if (!message) return message.status();
      if (const auto group = find((*message).group)) group->query().answer(*message);
      return Status::ok();
    }
    default: return Status::internal("a frame out of place");
  }
}

Status ControlPlane::Impl::handleAttach(const ControlChannel::Ptr& channel, AttachMessage message) {
  if (const auto group = find(message.group)) {
    FARANDOLE_RETURN_IF_ERROR(group->attach(channel, message));
    if (!isUsed(*channel)) channel->bye();
    return Status::ok();
  }
  const auto waiting =
      std::count_if(early_.begin(), early_.end(), [&](const Early& entry) { return entry.channel == channel; });
  if (static_cast<std::size_t>(waiting) >= (channel->isTrusted() ? kMaxEarly : kMaxEarlyStranger)) {
    return Status::internal("attaches to too many groups that this process has not joined");
  }
  early_.push_back({channel, std::move(message)});
  return Status::ok();
}

void ControlPlane::Impl::shutDown(std::function<void()> done) {
  shutDownDone_ = std::move(done);
  shutDownTimer_.expires_after(kHandoverLimit);
  shutDownTimer_.async_wait([self = shared_from_this()](const error_code& error) {
    if (error || self->closed_) return;
    self->farewells_ = true;
    self->finishShutDown();
  });
  finishShutDown();
}

// First groups that were left are given time to hand over what they know; then
// connections that only such groups used end in order, and at last all is closed.
void ControlPlane::Impl::finishShutDown() {
  if (closed_) return;
  const bool leaving = std::any_of(groups_.begin(), groups_.end(), [](const auto& entry) {
    return entry.second->isLeaving() && !entry.second->isSettled();
  });
  if (leaving && !farewells_) return;
  const auto channels = channels_;
  bool ending = false;
  for (const ControlChannel::Ptr& channel : channels) {
    const bool orphaned = std::any_of(groups_.begin(), groups_.end(), [&](const auto& entry) {
      return !entry.second->isLeaving() && entry.second->uses(*channel);
    });
    if (orphaned || !channel->wasOpened()) {
      channel->abandon();
      channels_.erase(channel);
    } else {
      channel->bye();
      ending = true;
    }
  }
  if (!ending) return close();
  if (!farewells_ || shutDownTimer_.expiry() <= std::chrono::steady_clock::now()) {
    farewells_ = true;
    shutDownTimer_.expires_after(kFarewellLimit);
    shutDownTimer_.async_wait([self = shared_from_this()](const error_code& error) {
      if (!error) self->close();
    });
  }
}

void ControlPlane::Impl::close() {
  if (closed_) return;
  closed_ = true;
  closeGuarded(acceptor_);
  acceptTimer_.cancel();
  shutDownTimer_.cancel();
  for (const auto& [key, group] : groups_) group->drop();
  groups_.clear();
  early_.clear();
  for (const ControlChannel::Ptr& channel : std::exchange(channels_, {})) channel->abandon();
  if (const auto done = std::exchange(shutDownDone_, nullptr)) done();
}

}  // namespace farandole::net
