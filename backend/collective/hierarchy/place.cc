#include "backend/collective/hierarchy/hierarchy.h"

namespace farandole::collective::hierarchy {

std::vector<int> Place::ranksOnHosts() const {
  std::vector<int> counts;
  counts.reserve(layout_.numHosts());
  for (int host = 0; host < layout_.numHosts(); ++host) {
    counts.push_back(static_cast<int>(layout_.ranksOf(host).size()));
  }
  return counts;
}

Team Place::lane() const {
  Team team{{}, host(), ranksOnHosts(), depth_};
  team.ranks.reserve(layout_.numHosts());
  for (int host = 0; host < layout_.numHosts(); ++host) team.ranks.push_back(layout_.ranksOf(host)[index()]);
  return team;
}

Team Place::leaders(int special) const {
  Team team{{}, host(), ranksOnHosts()};
  team.ranks.reserve(layout_.numHosts());
  for (int host = 0; host < layout_.numHosts(); ++host) {
    team.ranks.push_back(host == layout_.hostOf(special) ? special : layout_.ranksOf(host)[0]);
  }
  return team;
}

}  // namespace farandole::collective::hierarchy
