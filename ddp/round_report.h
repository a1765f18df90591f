#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "ddp/model_agreement.h"

namespace farandole::ddp {

// What the ranks tell each other at the end of a round, so that what goes wrong on one
// is an error on all: a collective of a few bytes between CPUs, and a second one only
// where something is wrong. Where the group reaches no CPU, a rank knows only of itself.
class RoundReport {
 public:
  // `flags`: how many numbers ranks share in a round.
  RoundReport(const DataParallelGroups& groups, size_t flags);

  // Whether these ranks reach each other's CPUs.
  static bool canTell(const Replicas& replicas);

  // Collective. `trouble` is empty when nothing is wrong on this rank. Of each flag the largest is told.
  void start(std::string trouble, const std::vector<char>& flags);

  // Waits. What is wrong on any rank, one line for each; empty when nothing is.
  std::string finish();

  // After finish().
  bool flag(size_t index) const;

  // What rank 0 of the replicas has, given to all; as it is where no CPU is reached.
  std::vector<int> agree(const Replicas& replicas, const std::vector<int>& mine) const;

 private:
  Replicas replicas_;
  bool isShared_;
  at::Tensor values_;  // trouble, then flags
  std::string trouble_;
  WorkPtr work_;
};

}  // namespace farandole::ddp
