#include "backend/common/rank_name.h"

namespace farandole {
namespace {

std::string globalRankText(int rank, int globalRank) {
  return globalRank < 0 || globalRank == rank ? "" : "global rank " + std::to_string(globalRank);
}

}  // namespace

std::string rankName(int rank, int globalRank) { return "rank " + rankNumber(rank, globalRank); }

std::string rankNumber(int rank, int globalRank) {
  const std::string global = globalRankText(rank, globalRank);
  return std::to_string(rank) + (global.empty() ? "" : " (" + global + ")");
}

std::string rankName(int rank, int globalRank, const std::string& host, int pid) {
  const std::string global = globalRankText(rank, globalRank);
  return "rank " + std::to_string(rank) + " (" + (global.empty() ? "" : global + ", ") + "host " + host + ", pid " +
         std::to_string(pid) + ")";
}

}  // namespace farandole
