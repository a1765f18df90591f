#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/common/status.h"
#include "backend/net/control_group.h"
#include "backend/net/event_loop.h"

namespace farandole::net {

// Tells every rank of a group, within a second, that another one died, became
// unreachable or aborted. One per process; it keeps a few TCP connections per
// group, along a tree over the ranks, and is silent while nothing happens.
// backend/THREADING.md tells the protocol. All methods from any thread; they
// return at once, callbacks come on the loop. In a forked child every method
// fails and the destructor does nothing.
class ControlPlane {
 public:
  static Result<std::unique_ptr<ControlPlane>> listen(EventLoop& loop, ControlTimes times = {});

  // Closes everything within 200 ms, which are used to say good-bye to groups
  // that were left. A group that was not left sees this process as dead. Before
  // the loop is stopped; not from the loop.
  ~ControlPlane();
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  // Opaque bytes, to be published to the other ranks.
  const std::string& address() const { return address_; }

  // `token` is what all members share and nobody else knows: at least 16 random
  // bytes. `members` are all ranks' in order; members[rank] is this process.
  // The listener is told until it is gone or the group is left. A group's name
  // may be used again after it was left, with another token.
  Status joinGroup(const std::string& group, int rank, const std::vector<ControlMember>& members,
                   const std::string& token, std::weak_ptr<ControlListener> listener);

  // In order: no other rank takes it for a failure. Callbacks end soon after. With its last group a process is gone.
  Status leaveGroup(const std::string& group);

  // For the end of the process.
  void leaveAllGroups();

  // Tells all others, once per group; this rank's own listener is not told.
  Status abort(const std::string& group, const std::string& reason);

  // Tells all, also this rank's own listener, that the process of another rank is dead: for what sees it surely, and
  // may see it first. Nothing where it is known to have left.
  Status reportDeath(const std::string& group, int rank, const std::string& reason);

  // Every rank's ControlListener::report(), on the loop, within `limit` and once;
  // not at all when the plane is destroyed before; no answers when the group was left.
  Status askAllRanks(const std::string& group, std::chrono::milliseconds limit, GroupAnswersHandler handler);

 private:
  class Impl;
  ControlPlane(std::shared_ptr<Impl> impl, std::string address);
  Status checkOwner() const;
  Result<std::string> keyOf(const std::string& group) const;
  void leave(const std::string& key, bool isGone);

  const int pid_;
  std::shared_ptr<Impl> impl_;
  const std::string address_;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> joined_;  // guarded by mutex_: group -> its key on the wire
};

}  // namespace farandole::net
