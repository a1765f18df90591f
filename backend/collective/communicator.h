#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/collective/algorithm_table.h"
#include "backend/collective/call_history.h"
#include "backend/collective/exchange_depth.h"
#include "backend/collective/group_watch.h"
#include "backend/collective/host_layout.h"
#include "backend/collective/host_segment.h"
#include "backend/collective/operation.h"
#include "backend/collective/swap_ways.h"
#include "backend/collective/topology.h"
#include "backend/transport/connections.h"

namespace farandole::collective {

// How to reach one rank of a group.
struct Member {
  std::string address;      // its transport's
  std::uint32_t group = 0;  // its own number for the group, which tags to it carry
  std::string host;
  int pid = 0;
  // Equal on ranks that can share memory; empty where that is not used.
  std::string hostIdentity;
  // AlgorithmTable::overrides() of its process.
  std::string algorithms;
  // Among all ranks of the program; negative where that is not known.
  int globalRank = -1;
};

// Ok, or who of two ranks has which FARANDOLE_ALGORITHMS: they would wait for different messages.
Status checkSameAlgorithms(int rank, const Member& member, int otherRank, const Member& other);

// One group over the process's connections: ranks instead of peers, and what is
// in flight among them.
//
// Thread: as Transport (with it held), except where said.
class ProgramOperation;

class Communicator final : public transport::ProgressEngine::Listener, private transport::ProgressEngine::Poller {
 public:
  // `keepAlive` is held for as long as the communicator: the owner of `connections`.
  Communicator(transport::Connections& connections, std::shared_ptr<void> keepAlive, int rank,
               std::vector<Member> members, AlgorithmTable table = {});
  ~Communicator() override;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  transport::ProgressEngine& engine() { return connections_.engine(); }

  // Ok, or why nothing can be started any more.
  const Status& usable() const { return aborted_; }
  // Ends all that is in flight and all that comes with this error. Any thread, nothing held.
  void abort(const Status& status);
  // The same on all ranks of this host that share memory.
  void abortAll(const Status& status);
  // Waits until collectives that have been started are done, but no longer than that, nor for any of a group that is
  // over. Any thread, nothing held.
  void finishCollectives(transport::Clock::time_point deadline);
  // Of a group that spans hosts, before the first operation: whose word on deaths counts. Nothing held.
  void setWatch(std::shared_ptr<GroupWatch> watch);
  // Its word: `rank` has died, or has aborted the group, which is over with that. Any thread, nothing held.
  void rankFailed(int rank, const Status& status);
  // `other` has the same ranks over other connections, which see less: it ends with this one, and is told who is gone.
  // Nothing held.
  void setFollower(const std::shared_ptr<Communicator>& other);
  // What is in flight, for people: "ALLREDUCE number 3 on rank 0 and 2 more are pending". Any thread, nothing held.
  std::string describePending();
  // Connects to the ranks of this host, so that the death of any of them is seen,
  // and shares memory with them when there are any. Before the first operation, on
  // every rank; waits for the others until `deadline`, and asks `health` now and then whether they will come. Nothing
  // held. `windowBytes` counts on the host's first rank.
  using Health = std::function<Status()>;
  Status connectHost(transport::Clock::time_point deadline, std::size_t windowBytes = HostSegment::kWindowBytes,
                     const Health& health = Status::ok);
  // What collectives are built for. Valid as long as the communicator; after connectHost().
  const Topology& topology() const { return topology_; }
  // The table's rules, and what of this group they depend on: a line for each, for people.
  std::vector<std::string> describeAlgorithms() const;
  // By index in the segment that the ranks of this host share, which is that among them.
  int rankOnHost(int index) const { return localRanks()[index]; }
  // A rank that will do nothing any more: its process died, or left.
  struct Gone {
    Member member;
    Status status;
  };
  // Those that are known to be. Any thread, nothing held.
  std::vector<Gone> gone();
  // Ends this operation with a timeout, unless it is done. Any thread, nothing held.
  void timeOut(Operation& operation, std::chrono::milliseconds timeout);
  // Of one that goes on though somebody has not waited for it longer than this: what it waits for; ok when it is done.
  Status latenessOf(const Operation& operation, std::chrono::milliseconds timeout);

  // "rank 1 (host a, pid 7)", "rank 1 (global rank 3, host a, pid 7)".
  std::string describe(int rank) const;
  // "rank 1", "rank 1 (global rank 3)".
  std::string nameOf(int rank) const;
  // The same of several: "ranks 1, 2 (global rank 5)".
  std::string nameOf(const std::vector<int>& ranks) const;
  // What carries messages to this rank. Any thread, nothing held.
  std::string transportOf(int rank);

 private:
  friend class Operation;
  friend class ProgramOperation;

  void send(int peer, p2p::MessageKind kind, std::uint32_t tag, std::uint32_t element, const void* data,
            std::size_t bytes, Message& message);
  void recv(int peer, p2p::MessageKind kind, std::uint32_t tag, std::uint32_t element, void* data, std::size_t bytes,
            Message& message);
  // Of a message from any rank: from whom it came.
  void noteReceived(int rank, std::size_t bytes);
  Result<transport::PeerId> peerOf(int rank);
  std::string describePendingHere() const;
  // This rank is dead: lets go of what is under way with it, which no message ends any more.
  void drop(int rank, const Status& why);
  // What the death of a rank looks like from here.
  Status deathSeen() const;
  // False when there is no connection: the message is done, with the reason.
  bool connectFor(int peer, Message& message);
  // What the other ranks do, for people, where there is a watch to ask.
  std::string askOthers(const Operation& operation);
  // `text`, whom the operation waits for, and what the others say.
  static Status timeoutOf(const Operation& operation, std::string text, const std::string& others);
  void add(Operation& operation);
  void remove(Operation& operation);
  // A group that has lost a member is of no use: operations among the others may wait for it in turn.
  void failAll(const Status& status, int culprit = HostSegment::kNobody);
  // Nobody receives anything of a group that is over.
  void closeToMessages();
  // A collective that is pending, which is kept alive; or null.
  Operation* heldCollective();
  // Ends every pending operation for which `select` gives an error.
  void failPending(const std::function<Status(Operation&)>& select);
  // Whether the connections to all others have ended; whether nobody is left who could send anything.
  bool areOthersGone() const;
  bool canNobodySend() const;
  // The operations with messages that this rank has yet to send or receive.
  std::vector<Operation*> waitingFor(int rank);
  // All ranks hear of the death, and that this rank has seen it.
  void reportDeath(int rank, const Status& status);
  // Whom this one follows has lost a rank: what that had sent here may still be on its way, for a while.
  void noteDeparture(int rank, const Status& status);
  // Ends what waits for those who have departed long enough ago.
  void settleDepartures();
  // Likewise for those who have left the group, or given it up, and go on with others: no connection tells when the
  // last that they sent has come.
  void noteLeavers();
  void settleLeavers();
  // Has the follower told, with nothing held.
  void tellFollower(const std::function<void(Communicator&)>& tell);
  // What the others say, for the error of a timeout; or nothing.
  std::string answers() const;
  // Ends an operation that has lost a rank. Where there is a watch its word comes first, for it
  // knows why, unless it takes too long.
  void failForLoss(Operation& operation, int rank, const Status& status);
  // Why a rank takes no more messages of this group: what it has told the ranks of its host, or else `status`.
  Status whyClosed(int rank, const Status& status) const;
  // The death that a rank of this host gave the group up for, before this rank has seen it; or ok.
  Status toldDeath() const;
  // Ends those that have waited for that word, all or those that have done so for long enough.
  void settleLosses(bool all);

  void peerFailed(transport::PeerId peer, const Status& status) override;
  void checkDeadlines(transport::Clock::time_point now) override;
  bool lookAround() override;

  // Of programs that use the host's memory: whether it is this one's turn; that it has ended.
  bool begin(ProgramOperation& operation);
  void end(ProgramOperation& operation);
  void noteLost(int rank) { lost_ = rank; }
  // Tells the ranks of this host that this one has left its part in a collective undone. Whoever
  // still reads its memory is to know that before the memory is used for something else.
  void giveUp(const Status& status);
  // Ends the group: a rank has left its part in a collective undone.
  void abandon(const Status& status);
  void signal(std::uint64_t value);
  // Copies what the rank with this index on the host has offered to be read.
  Status readFrom(int index, void* to, const void* from, std::size_t bytes);
  // Ok, or why the rank with this index will never get as far as it is waited for.
  Status canCome(int index) const;
  // Of this host.
  Status abortOf(int rank) const;
  bool poll() override;
  bool isReady(bool isAwaited) override;
  bool isUrgent() const override;
  bool waitsForThisCore() const override;
  void noteCore() override { host_->noteCore(); }
  Result<transport::SharedMemory> meetHost(transport::Clock::time_point deadline, std::size_t windowBytes,
                                           const Health& health);
  // Until all ranks of the host have told each other how they read the others' memory.
  Status agreeOnReading(HostSegment& host, transport::Clock::time_point deadline, const Health& health);
  const std::vector<int>& localRanks() const { return layout_.ranksOf(layout_.hostOf(rank_)); }
  // Wakes the other ranks of the host up, if they sleep.
  void nudgeHost();
  int culpritOf(const Status& status) const;

  struct Peer {
    bool connected = false;
    transport::PeerId id{};
    Status failure;
  };
  struct Loss {
    Operation* operation;
    int rank;  // or kAnySource
    Status status;
    int looks = 0;  // at the deadlines, since then
  };

  struct Departure {
    int rank;
    Status status;
    int looks = 0;  // at the deadlines, since then
  };
  struct Leaver {
    int rank;
    std::string why;
    int looks;  // at the deadlines that are still to come, for what it had sent
  };

  transport::Connections& connections_;
  const std::shared_ptr<void> keepAlive_;
  const int rank_;
  const std::vector<Member> members_;
  const HostLayout layout_;
  const AlgorithmTable table_;
  std::vector<Peer> peers_;
  Status aborted_;
  bool isReasonKnown_ = false;       // of it; a watch's word may still replace what it looked like
  int lost_ = HostSegment::kNobody;  // whose connection broke last
  std::vector<Loss> losses_;         // each holds its operation as an outstanding message does
  std::shared_ptr<GroupWatch> watch_;
  std::weak_ptr<Communicator> follower_;
  std::vector<Departure> departures_;
  std::vector<Leaver> leavers_;
  int looks_ = 0;                      // at the deadlines
  bool asked_ = false;                 // the watch, about operations whose time is over
  std::unique_ptr<HostSegment> host_;  // of the ranks of this host, when there are two or more
  struct Neighbour {
    int index;  // on the host
    transport::PeerId peer;
  };
  std::vector<Neighbour> hostNeighbours_;  // the others of them
  std::optional<SwapWays> swapWays_;
  std::optional<ExchangeDepth> depth_;
  Topology topology_;
  std::deque<ProgramOperation*> turns_;  // the first one runs
  CallHistory history_;                  // of what was started
  Operation* pending_ = nullptr;         // the head of the list, oldest last
};

}  // namespace farandole::collective
