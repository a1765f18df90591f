#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace farandole::ddp {

// The order in which bucket groups are issued, which must be the same on all ranks
// that have a part in them whatever order gradients come in: at first by index,
// later as the ranks have agreed on (order_learning.h). Not synchronized.
class IssueQueue {
 public:
  // `groups` ascending.
  explicit IssueQueue(std::vector<int> groups);

  void markReady(int group);

  // What is marked from now on in this round has got no gradient that it waits for.
  void endArrivals() { arrived_ = arrivals_.size(); }

  // The next to be issued, if it is ready; it counts as issued then.
  std::optional<int> takeNext();

  // By place among the groups by index: how many became ready before this one in this round. After endArrivals() all
  // share the place behind the last.
  std::vector<int> places() const;

  // From the next round on: by the places that the ranks have agreed on.
  void orderBy(const std::vector<int>& places);

  std::size_t size() const { return groups_.size(); }
  std::vector<int> order() const;

  // Begins a new round.
  void reset();

 private:
  const std::vector<int> groups_;
  std::vector<std::size_t> order_;     // places in `groups_`
  std::vector<std::size_t> arrivals_;  // of this round, likewise
  std::vector<char> isReady_;          // likewise
  std::size_t arrived_;                // how many of the arrivals gradients have brought
  std::size_t issued_ = 0;
};

}  // namespace farandole::ddp
