#pragma once

#include <string>
#include <vector>

namespace farandole::collective {

// What a group that spans hosts knows of its other ranks beside what its
// transports tell. Any thread.
class GroupWatch {
 public:
  virtual ~GroupWatch() = default;
  // Ends the group on all other ranks; returns at once.
  virtual void abort(const std::string& reason) = 0;
  // This rank has seen that another one's process is dead, which its neighbours in the tree may not have: all others
  // are told; returns at once.
  virtual void reportDeath(int rank, const std::string& reason) = 0;
  // Asks all ranks what they are doing, unless a question is under way; returns at once.
  virtual void ask() = 0;
  // None is under way: a question ends soon, also when a rank does not answer.
  virtual bool hasAnswers() = 0;
  // Waits for that. Not on the loop, nothing held.
  virtual void awaitAnswers() = 0;
  // What they have answered so far, for an error: "rank 0: ...; rank 1: no answer"; or nothing.
  virtual std::string answers() = 0;
  // Ranks that have left the group in order.
  virtual std::vector<int> left() { return {}; }
  // Those of them that have left all groups of their process.
  virtual std::vector<int> departed() { return {}; }
};

}  // namespace farandole::collective
