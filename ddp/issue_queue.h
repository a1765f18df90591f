#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace farandole::ddp {

// The order in which bucket groups are issued, which must be the same on all ranks
// that have a part in them whatever order gradients come in: at first by index,
// later as the ranks have agreed on. Not synchronized.
class IssueQueue {
 public:
  // `groups` ascending.
  explicit IssueQueue(std::vector<int> groups);

  void markReady(int group);

  // The next to be issued, if it is ready; it counts as issued then.
  std::optional<int> takeNext();

  // The order in which groups became ready in this round.
  const std::vector<int>& arrivals() const { return arrivals_; }

  // From the next round on. A permutation of the groups, else false and nothing changes.
  [[nodiscard]] bool setOrder(const std::vector<int>& order);
  const std::vector<int>& order() const { return order_; }

  // Begins a new round.
  void reset();

 private:
  std::vector<int> order_;
  std::vector<int> arrivals_;
  std::vector<char> isReady_;  // by group
  std::size_t issued_ = 0;
};

}  // namespace farandole::ddp
