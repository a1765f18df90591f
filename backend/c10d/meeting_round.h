#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace farandole::backend {

// Which of the meetings in a store is the one of now. A store may outlive the groups that met in it, and their
// processes, as that of torchrun's agent does: the next ones then find there what the earlier ones left, under the same
// names. So each meeting has a store of its own in it, under a name that rank 0 makes up. What the others find may be
// an earlier one's: they are in it once rank 0 has answered a number that they have just made up.
//
// Thread: any, one at a time.
class MeetingRound {
 public:
  using StorePtr = c10::intrusive_ptr<::c10d::Store>;

  MeetingRound(StorePtr shared, int rank, int size);

  // Rank 0 begins one, and is in it once it looks.
  void begin();
  // Rank 0 answers those who have come since; to be called while it waits for them. Whether somebody has.
  bool welcome();
  // The others look once. Whether they have found another one, or are in it now.
  bool enter();

  // Whether another process has come as this rank, which is in no meeting yet: to that of now, or to an earlier one,
  // as every process has after a restart.
  bool isTwice() const;
  void tellTwice();
  // Rank 0 looks: who was told to have come twice to this meeting, or rank 0 where another one has begun since.
  std::optional<int> whoIsTwice() const;

  // Of this round, or of what may be an earlier one; null until one was found.
  const StorePtr& store() const { return store_; }
  bool isEntered() const { return isEntered_; }

  // That there will be no group, and why: to those who are in it, or wait to be.
  void giveUp(const std::string& reason);
  // Why another rank has given it up; nothing while none has. To a rank that is not in it that may be an earlier one's:
  // not what this process was told before, nor anything where an agent may have started this process again, which ends
  // all ranks when one fails.
  std::optional<std::string> givenUp();

 private:
  using Blob = std::vector<std::uint8_t>;

  void open(const Blob& name);
  bool isWelcome();
  // Whether something else than this rank's number is there.
  bool isAnothers(const std::string& key) const;
  std::optional<std::string> readGivenUp(::c10d::Store& store) const;

  const StorePtr shared_;
  const StorePtr waiting_;  // of those who have found none
  const int rank_;
  const Blob number_;
  std::vector<int> awaited_;  // by rank 0: who was not answered yet
  std::string name_;
  StorePtr store_;
  bool isEntered_ = false;
  std::string toldTwice_;  // the round that was told
};

}  // namespace farandole::backend
