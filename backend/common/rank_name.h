#pragma once

#include <string>

namespace farandole {

// A rank of a group, for people: "rank 1", and where its number among all ranks of the program is another one: "rank 1
// (global rank 3)". A negative global rank is not known.
std::string rankName(int rank, int globalRank);

// "1", "1 (global rank 3)".
std::string rankNumber(int rank, int globalRank);

// With its process: "rank 1 (host a, pid 7)", "rank 1 (global rank 3, host a, pid 7)".
std::string rankName(int rank, int globalRank, const std::string& host, int pid);

}  // namespace farandole
