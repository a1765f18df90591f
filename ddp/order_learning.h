#pragma once

#include <cstddef>
#include <vector>

namespace farandole::ddp {

// How ranks come to one order of bucket groups that makes them wait little: by the latest place at which each became
// ready on any rank in the last rounds, since it can be reduced only once the last rank has it. Where control flow
// departs from what they have agreed on they agree anew: at once where a group comes later, for all behind it wait; on
// the rest (some come earlier again) at the end of a window of rounds. So a rank for which branches alternate settles
// on an order that has those late which some rounds lack, and asks no more. Not synchronized.
class OrderLearning {
 public:
  static constexpr int kWindow = 16;  // rounds

  explicit OrderLearning(std::size_t groups);

  // The places of groups in a round of this rank, which are all below or at the number of groups; not of one whose
  // groups were ready in no order.
  void note(const std::vector<int>& places);

  // Then, in the same round: whether this rank asks for the ranks to agree anew.
  bool departs() const;

  // Then, on all ranks, where any asks: what this rank has to say, of which the largest of all ranks are learned.
  std::vector<int> tell();
  void learn(const std::vector<int>& largest) { agreed_ = largest; }

  // In the end of each round, on all ranks.
  void endRound();

  // Places of groups by the places at which they become ready, by index where these are the same.
  static std::vector<std::size_t> orderOf(const std::vector<int>& places);

 private:
  bool isWindowOver() const { return rounds_ + 1 == kWindow; }

  // By group; -1: nothing is known.
  std::vector<int> recent_;  // the latest places in this window
  std::vector<int> told_;
  std::vector<int> agreed_;
  int rounds_ = 0;  // of this window
};

}  // namespace farandole::ddp
