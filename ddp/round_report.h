#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstddef>
#include <optional>
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
  // `isOfExperts`: of flags that ranks share in a round, whether each is shared by the replicas of experts alone.
  // `ordersExperts`: these have an order of buckets of their own to tell of.
  RoundReport(const DataParallelGroups& groups, const std::vector<char>& isOfExperts, bool ordersExperts);

  // Whether these ranks reach each other's CPUs.
  static bool canTell(const Replicas& replicas);

  // Collective. `trouble` is empty when nothing is wrong on this rank. `untrained`: how many forwards nothing could be
  // differentiated of, of a rank that has such a number, for it must be one. `departs`: by the queues of BucketIssuer,
  // whether this rank asks for another order. Of each flag the largest is told.
  void start(std::string trouble, std::optional<int> untrained, const std::array<bool, 2>& departs,
             const std::vector<char>& flags);

  // Waits. What is wrong on any rank, one line for each; empty when nothing is.
  std::string finish();

  // After finish().
  bool flag(std::size_t index) const;
  bool departs(std::size_t queue) const;  // any rank

  // Collective: of each number the largest of the replicas; as it is where no CPU is reached.
  static std::vector<int> largest(const Replicas& replicas, const std::vector<int>& mine);

 private:
  // Numbers of which each of these ranks gets the largest that any has.
  struct Largest {
    Largest(Replicas ranks, std::size_t count);
    void start();
    void finish();
    int* data() { return values.mutable_data_ptr<int>(); }
    int told(std::size_t index) const { return values.const_data_ptr<int>()[index]; }

    Replicas replicas;
    bool isShared;
    at::Tensor values;
    WorkPtr work;
  };

  bool areUnlike() const;
  std::string describeUnlike() const;

  std::vector<char> isOfExperts_;
  Largest ofAll_;      // trouble, whether any departs, the most and, negative, the fewest untrained forwards, flags
  Largest ofExperts_;  // the same, but for the trouble and the forwards
  std::string trouble_;
  std::optional<int> untrained_;
};

}  // namespace farandole::ddp
