#include "backend/collective/host_layout.h"

#include <algorithm>
#include <unordered_map>

namespace farandole::collective {

HostLayout::HostLayout(std::span<const std::string> identities) {
  std::unordered_map<std::string, int> known;
  for (const std::string& identity : identities) {
    int host = numHosts();
    if (!identity.empty()) host = known.emplace(identity, host).first->second;
    if (host == numHosts()) hosts_.emplace_back();
    hosts_[host].push_back(numRanks());
    places_.push_back({host, static_cast<int>(hosts_[host].size()) - 1});
  }
  const auto [fewest, most] = std::ranges::minmax_element(hosts_, {}, &std::vector<int>::size);
  if (fewest != hosts_.end()) {
    fewest_ = static_cast<int>(fewest->size());
    most_ = static_cast<int>(most->size());
  }
}

}  // namespace farandole::collective
