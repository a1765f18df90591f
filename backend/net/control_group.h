#pragma once

#include <boost/asio/steady_timer.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "backend/net/control_channel.h"
#include "backend/net/group_query.h"

namespace farandole::net {

// One rank of a group, as all of them published it.
struct ControlMember {
  std::string address;  // ControlPlane::address()
  std::string host;     // for messages
  int pid = 0;          // for messages
  int globalRank = -1;  // for messages: among all ranks of the program, if that is known
};

// Ranks that have left a group in order. Apart from the listener, which the loop must not hold on to when groups are
// destroyed, as they are just then. Any thread.
class Departures {
 public:
  // `isGone`: with all other groups of its process.
  void add(int rank, bool isGone) {
    std::lock_guard lock(mutex_);
    left_.push_back(rank);
    if (isGone) gone_.push_back(rank);
  }
  std::vector<int> left() const {
    std::lock_guard lock(mutex_);
    return left_;
  }
  std::vector<int> gone() const {
    std::lock_guard lock(mutex_);
    return gone_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<int> left_;
  std::vector<int> gone_;  // those of them
};

// What a group tells its process, on the loop, with nothing locked. Each rank
// is named at most once in each.
class ControlListener {
 public:
  virtual ~ControlListener() = default;
  // kPeerFailed; the message names rank, pid, host, reason and who noticed. `rank` may be this process's own: the
  // others hold it for dead.
  virtual void peerFailed(int rank, const Status& status) = 0;
  // kAborted; `rank` is another one's.
  virtual void aborted(int rank, const Status& status) = 0;
  // Where to note them, if anywhere; asked when the group is joined.
  virtual std::shared_ptr<Departures> departures() { return nullptr; }
  // This rank's answer to askAllRanks(): short text, at once.
  virtual std::string report() { return {}; }
};

// This process's place in one group: its connections to neighbours in the
// group's tree, and the facts that all ranks shall know. A fact is passed on to
// every neighbour once; a new neighbour is told all facts so far, so none is
// lost while the tree is rebuilt around a rank that is gone. Loop only; owned
// by the plane, which keeps it after the group was left: who comes late asks
// for a rank that left, and is told so.
class ControlGroup : public std::enable_shared_from_this<ControlGroup> {
 public:
  // What a group needs of its plane.
  class Plane {
   public:
    virtual ~Plane() = default;
    // A connection that is open or being opened.
    virtual ControlChannel::Ptr channelTo(const ControlAddress& address) = 0;
    // The group no longer uses this connection.
    virtual void released(const ControlChannel::Ptr& channel) = 0;
    // The group was left, and what it knew is in others' hands.
    virtual void settled() = 0;
  };
  struct Member {
    ControlAddress address;
    std::string host;
    int pid;
    int globalRank;
  };

  ControlGroup(EventLoop& loop, Plane& plane, const ControlTimes& times, std::string key, int rank,
               std::vector<Member> members, std::string token, std::weak_ptr<ControlListener> listener);

  const std::string& key() const { return key_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  bool isLeaving() const { return leaving_; }
  bool isSettled() const { return settled_; }
  bool isGone(int rank) const { return gone_[static_cast<std::size_t>(rank)]; }
  bool uses(const ControlChannel& channel) const;
  std::shared_ptr<ControlListener> listener() const { return listener_.lock(); }
  // Those that both sides have attached to this group.
  std::vector<ControlChannel::Ptr> neighbours() const;

  void join();
  // `isGone`: all others of this process are left with it.
  void leave(bool isGone);
  void abort(const std::string& reason);
  void reportDeath(int rank, const std::string& reason);
  // Ends it without a word: no callback, no message, no timer any more.
  void drop();

  void channelOpened(const ControlChannel::Ptr& channel);
  void channelClosed(const ControlChannel::Ptr& channel, const Status& status);
  // An error: the sender is not who it says it is.
  Status attach(const ControlChannel::Ptr& channel, const AttachMessage& message);
  void facts(const ControlChannel::Ptr& channel, const FactsMessage& message);
  void handed();
  GroupQuery& query() { return query_; }

 private:
  struct Peer {
    ControlChannel::Ptr channel;
    int rank = -1;
    bool sent = false;      // our attach
    bool received = false;  // theirs
  };

  bool hasParent() const;
  void searchParent();
  void call(int rank);
  void expectChildren();
  void callMissingChildren();
  void connectionFailed(int rank, bool answered, const Status& status);
  void suspect(int rank, const Status& status);
  void sendAttach(Peer& peer);
  void sendFacts(const ControlChannel::Ptr& channel, std::vector<Fact> facts);
  void learn(const Fact& fact, const ControlChannel::Ptr& from);
  std::string nameOf(int rank) const;
  void tell(const Fact& fact);
  void release(const ControlChannel* channel);
  void settleWhenPossible();
  template <typename Handler>
  void after(boost::asio::steady_timer& timer, std::chrono::milliseconds time, Handler handler);

  EventLoop& loop_;
  Plane* plane_;  // null once dropped
  const ControlTimes times_;
  const std::string key_;
  const int rank_;
  const std::vector<Member> members_;
  const std::string token_;
  std::weak_ptr<ControlListener> listener_;
  const std::shared_ptr<Departures> departures_;

  std::map<const ControlChannel*, Peer> peers_;
  std::vector<Fact> facts_;
  std::vector<bool> gone_;     // left or failed
  std::vector<bool> aborted_;  // has told so

  int attempt_ = -1;                // the rank that is being attached to
  std::set<int> slow_;              // answer, but not yet for this group
  std::map<int, Status> suspects_;  // cannot be reached
  std::map<int, int> retries_;      // connections that ended before they were attached
  boost::asio::steady_timer attemptTimer_;
  std::map<int, boost::asio::steady_timer> suspectTimers_;
  boost::asio::steady_timer childTimer_;
  bool expecting_ = false;  // childTimer_ runs
  boost::asio::steady_timer leaveTimer_;

  GroupQuery query_;

  bool leaving_ = false;
  bool handed_ = false;
  bool settled_ = false;
};

}  // namespace farandole::net
