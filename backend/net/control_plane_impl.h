#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "backend/net/control_plane.h"
#include "backend/net/listening_socket.h"

namespace farandole::net {

// The half of ControlPlane that lives on the loop: its connections and groups,
// and which frame belongs to which. Handlers that wait for a connection or a
// timer hold it; close() ends them all.
class ControlPlane::Impl : public std::enable_shared_from_this<Impl>,
                           private ControlChannel::Owner,
                           private ControlGroup::Plane {
 public:
  Impl(EventLoop& loop, const ControlTimes& times, ListeningSocket listening);

  EventLoop& loop() { return loop_; }
  const ControlAddress& address() const { return address_; }
  std::shared_ptr<ControlGroup> makeGroup(std::string key, int rank, std::vector<ControlGroup::Member> members,
                                          std::string token, std::weak_ptr<ControlListener> listener);

  // The rest on the loop, or when it has ended.
  void start();
  void join(const std::shared_ptr<ControlGroup>& group);
  std::shared_ptr<ControlGroup> find(const std::string& key) const;
  // Says good-bye where there is somebody to say it to, then closes; `done` is told.
  void shutDown(std::function<void()> done);
  void close();

 private:
  // An attach for a group that this process has not joined yet.
  struct Early {
    ControlChannel::Ptr channel;
    AttachMessage message;
  };

  void channelOpened(const ControlChannel::Ptr& channel) override;
  void channelReceived(const ControlChannel::Ptr& channel, const Frame& frame) override;
  void channelClosed(const ControlChannel::Ptr& channel, const Status& status) override;
  ControlChannel::Ptr channelTo(const ControlAddress& address) override;
  void released(const ControlChannel::Ptr& channel) override;
  void settled() override;

  void waitForConnection();
  void acceptAll();
  void makeRoomForStranger();
  Status handle(const ControlChannel::Ptr& channel, const Frame& frame);
  Status handleAttach(const ControlChannel::Ptr& channel, AttachMessage message);
  bool isUsed(const ControlChannel& channel) const;
  void finishShutDown();

  EventLoop& loop_;
  const ControlTimes times_;
  const ControlAddress address_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer acceptTimer_;
  boost::asio::steady_timer shutDownTimer_;
  std::set<ControlChannel::Ptr> channels_;
  std::deque<std::weak_ptr<ControlChannel>> strangers_;  // of them; the oldest first
  std::map<std::string, std::shared_ptr<ControlGroup>> groups_;
  std::deque<std::string> graves_;  // keys of groups that were left, the oldest first
  std::vector<Early> early_;
  std::function<void()> shutDownDone_;
  bool farewells_ = false;  // the last phase of a shut-down
  bool closed_ = false;
};

}  // namespace farandole::net
