#pragma once

#include <span>
#include <string>
#include <vector>

namespace farandole::collective {

// The ranks of a group by the host that they are on. Hosts are in the order of
// their first ranks, and the ranks of a host in their order. Equal on all ranks.
class HostLayout {
 public:
  // By rank. Equal identities share a host; an empty one is a host of its own.
  explicit HostLayout(std::span<const std::string> identities);

  int numRanks() const { return static_cast<int>(places_.size()); }
  int numHosts() const { return static_cast<int>(hosts_.size()); }
  const std::vector<int>& ranksOf(int host) const { return hosts_[host]; }
  int hostOf(int rank) const { return places_[rank].host; }
  // Its index among the ranks of its host.
  int indexOf(int rank) const { return places_[rank].index; }
  // Ranks on the host with the fewest, and on that with the most.
  int fewestRanks() const { return fewest_; }
  int mostRanks() const { return most_; }

 private:
  struct Place {
    int host;
    int index;
  };
  std::vector<std::vector<int>> hosts_;
  std::vector<Place> places_;  // by rank
  int fewest_ = 0;
  int most_ = 0;
};

}  // namespace farandole::collective
