#pragma once

#include <bitset>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/collective/communicator.h"
#include "backend/common/fork_count.h"
#include "backend/net/control_plane.h"
#include "backend/net/event_loop.h"
#include "backend/p2p/message_tag.h"
#include "backend/transport/connections.h"
#include "backend/transport/routing/routing_transport.h"

namespace farandole::backend {

// What all groups of a process share: the event loop, the transport and its
// connections, the numbers of the groups. Made with the first group, gone with
// the last. Any thread.
class ProcessContext {
 public:
  // The process's context; made when there is none. A forked child gets its own.
  static Result<std::shared_ptr<ProcessContext>> acquire();

  ~ProcessContext();

  transport::Connections& connections() { return *connections_; }
  // The same for all processes that can be reached by shared memory; empty when that is not used.
  const std::string& hostIdentity() const { return hostIdentity_; }
  // What processes of other hosts connect to; opens the network on first use. Nothing held.
  Result<std::string> networkAddress();

  // What the control planes of other processes connect to; makes this process's on first use.
  Result<std::string> controlAddress();
  // Runs `use` with the control plane, unless there is none or the process is about to end.
  Status useControlPlane(const std::function<Status(net::ControlPlane&)>& use);

  // `group` may tell of ranks that are gone, by their global ranks in `world`: what equals for groups whose global
  // ranks mean the same. Until it is let go of here: what comes later may have others with the same numbers.
  void addGroup(const void* world, const std::shared_ptr<collective::Communicator>& group);
  void removeGroup(const std::shared_ptr<collective::Communicator>& group);
  // Who of that world is gone, as far as any group of this process knows. Nothing held.
  std::vector<collective::Communicator::Gone> goneFrom(const void* world);

  // A number for a group that no other group of this process has.
  Result<std::uint32_t> takeGroupNumber();
  void returnGroupNumber(std::uint32_t number);

  // For the end of the process: says goodbye to its peers, stops the loop, and waits for the
  // hooks that failures have called, which must not enter an interpreter that is gone.
  static void leaveAtExit();

  // False in a forked child: the thread and the transport stayed with the parent.
  bool isOurs() const { return ForkCount::now() == forks_; }

 private:
  ProcessContext();
  static std::shared_ptr<ProcessContext> make(std::unique_ptr<transport::RoutingTransport> transport);
  Result<std::uint32_t> chooseGroupNumber();

  const std::uint32_t forks_;
  net::EventLoop loop_;
  std::string hostIdentity_;
  transport::RoutingTransport* routing_ = nullptr;  // of connections_
  std::unique_ptr<transport::Connections> connections_;
  std::mutex controlMutex_;
  std::unique_ptr<net::ControlPlane> control_;  // guarded by controlMutex_; none while all groups are on this host
  std::mutex mutex_;
  std::bitset<p2p::kMaxGroups> groupNumbers_;  // taken or not
  std::uint32_t nextGroupNumber_ = 0;
  struct KnownGroup {
    const void* world;
    std::weak_ptr<collective::Communicator> group;
  };
  std::vector<KnownGroup> groups_;  // guarded by mutex_
};

}  // namespace farandole::backend
