#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/c10d/meeting_round.h"
#include "backend/c10d/process_context.h"
#include "backend/collective/communicator.h"
#include "backend/net/control_plane.h"

namespace farandole::backend {

// How the ranks of a group reach each other.
struct Meeting {
  std::vector<collective::Member> members;
  // Of a group that spans hosts: its control plane, and what its members alone know, new with each group.
  std::vector<net::ControlMember> controls;
  std::string token;
};

// What must be the same on all ranks of a group.
struct CommonSettings {
  std::string algorithms;    // AlgorithmTable::overrides()
  std::string cudaMessages;  // FARANDOLE_CUDA_MESSAGES
};

// Where the ranks of a group meet: a store that all of them share. Waiting in it ends when a rank is late, and before
// that when one is known to be gone, by another group of this process or by the transport, here or at another rank.
class MeetingPlace {
 public:
  // `globalRanks`: by rank; empty where they are not known. `timeout`: for all of it, from now on.
  MeetingPlace(const MeetingRound::StorePtr& store, int rank, int size, std::vector<int> globalRanks,
               std::chrono::milliseconds timeout);

  // Tells how this process is reached and reads how the others are. `group` is this process's number for the group;
  // `context` stays for as long as this.
  Result<Meeting> meetMembers(ProcessContext& context, std::uint32_t group, const CommonSettings& settings);
  // What all ranks tell, by rank; `mine` is this one's. `name`: of what is told, once in a group.
  Result<std::vector<std::string>> exchange(const std::string& name, const std::string& mine);
  // Tells the others, who may still be waiting, that there will be no group, and returns the reason.
  Status giveUp(const Status& why);
  // The same where what this rank needs for the group is an error.
  template <typename T>
  Result<T> orGiveUp(Result<T> result) {
    return result ? std::move(result) : Result<T>(giveUp(result.status()));
  }
  // Ok, or why another rank has given the group up: it may know more.
  Status givenUp();

  // Once members have met: the part of the store that is theirs alone, though others met in it before.
  const MeetingRound::StorePtr& store() const { return round_.store(); }
  // What equals for groups whose global ranks mean the same.
  const void* world() const { return world_; }

 private:
  using Blob = std::vector<std::uint8_t>;
  // A member on this host that is met, and may die while others are waited for.
  struct Neighbour {
    collective::Member member;
    int rank;
    transport::PeerId peer;
  };

  std::string nameOf(int rank) const;
  int globalRank(int rank) const { return rank < static_cast<int>(globalRanks_.size()) ? globalRanks_[rank] : -1; }
  std::string keyOf(const std::string& board, int rank) const;
  void post(const std::string& board, const Blob& blob);
  Result<Blob> read(const std::string& board, int rank);
  // Until this rank is in the meeting of now.
  Status enterRound();
  Status timedOut(int rank) const;
  // By rank 0: ok, or which rank has come twice.
  Status onceEach();
  Result<Meeting> meetAll(std::uint32_t group, const CommonSettings& settings);
  // While somebody is waited for: ok, or who will not come, or not stay, as far as this process knows.
  Status health();
  void watch(int rank, const collective::Member& member);

  MeetingRound round_;
  Status givenUp_;  // what was heard of it
  const void* const world_;
  ProcessContext* context_ = nullptr;  // once members meet
  const int rank_;
  const int size_;
  const std::vector<int> globalRanks_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point deadline_;
  std::vector<Neighbour> neighbours_;
};

}  // namespace farandole::backend
