#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "ddp/model_agreement.h"

namespace farandole::ddp {

// What the ranks tell each other at the end of a round, so that what goes wrong on one
// is an error on all: a collective of a few bytes between CPUs, another one of experts' replicas where these have
// something to share, and one more only where something is wrong. Where the group reaches no CPU, a rank knows only of
// itself.
class RoundReport {
 public:
  // Of numbers that ranks share in a round: whether each is shared by the replicas of experts alone.
  RoundReport(const DataParallelGroups& groups, const std::vector<char>& isOfExperts);

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
  // Numbers of which each of these ranks gets the largest that any has.
  struct Largest {
    Largest(Replicas ranks, size_t count);
    void start();
    void finish();
    int* data() { return values.mutable_data_ptr<int>(); }

    Replicas replicas;
    bool isShared;
    at::Tensor values;
    WorkPtr work;
  };

  std::vector<char> isOfExperts_;
  Largest ofAll_;  // trouble, then flags
  Largest ofExperts_;
  std::string trouble_;
};

}  // namespace farandole::ddp
