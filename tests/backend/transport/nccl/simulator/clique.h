#pragma once

#include <nccl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/backend/transport/nccl/simulator/core.h"
#include "tests/backend/transport/nccl/simulator/kernel.h"

namespace farandole::testing {

struct Communicator;
struct Meeting;

// The ranks of one communicator together: where their kernels meet and the data moves, and which of them are connected.
class Clique {
 public:
  struct MessagePlace {
    int sender, receiver;
    std::uint64_t place;  // among the kernels of the sender that send to it, and of the receiver that receive from it
    bool operator<(const MessagePlace& other) const {
      return std::tie(sender, receiver, place) < std::tie(other.sender, other.receiver, other.place);
    }
  };

  Clique(Core& core, std::string name, std::vector<Communicator*> members);

  Core& core() { return core_; }
  const std::string& name() const { return name_; }
  int size() const { return static_cast<int>(members_.size()); }
  const std::vector<Communicator*>& members() const { return members_; }
  // Whether a rank other than `rank` is on a device that died.
  bool lost(int rank) const;
  // Whether `rank` can still answer.
  bool reachable(int rank) const;

  // A kernel has come to the collective at `place` of the communicator's order, or to its messages with a peer.
  void arrive(Kernel& kernel, std::uint64_t place);
  void arrive(Kernel& kernel, const MessagePlace& place, bool sends);
  // The kernels of `rank` end without their data.
  void endKernels(int rank);

  // Marks what `rank` needs for `plan`; those are the sides that the other ranks owe, as far as they do.
  struct Connection {
    int from, to;  // to < 0: all collectives, from the rank's side
    bool receiving;
    bool operator==(const Connection&) const = default;
    bool operator<(const Connection& other) const {
      return std::tie(from, to, receiving) < std::tie(other.from, other.to, other.receiving);
    }
  };
  std::vector<Connection> connect(int rank, const KernelPlan& plan);
  bool connected(const Connection& side) const { return connected_.count(side) > 0; }
  std::size_t countConnections(int rank) const;

  // Calls in which all ranks meet on the host, by the function and how many came before.
  std::map<std::pair<std::string, std::uint64_t>, std::shared_ptr<Meeting>> meetings;

 private:
  struct CollectiveSite {
    std::map<int, Kernel*> arrived;
    bool broken = false;
  };
  struct MessageSite {
    Kernel* sender = nullptr;
    Kernel* receiver = nullptr;
  };

  bool sameCollective(Kernel& kernel, Kernel& first);
  bool sameMessages(const MessagePlace& place, const std::vector<MessageCall>& sent,
                    const std::vector<MessageCall>& received);

  Core& core_;
  const std::string name_;
  const std::vector<Communicator*> members_;  // by rank
  std::map<std::uint64_t, CollectiveSite> collectives_;
  std::map<MessagePlace, MessageSite> messages_;
  std::set<Connection> connected_;
};

}  // namespace farandole::testing
