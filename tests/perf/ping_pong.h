#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace farandole::perf {

struct PingPong {
  std::int64_t bytes;
  int warmUp;      // round trips that are not timed
  int iterations;  // round trips of one sample
  int samples;
};

// Half a round trip in seconds, over the round trips of one sample. The median
// is what the path costs; the mean also holds what the machine did meanwhile.
struct HalfRoundTrip {
  double median;
  double mean;
};

// Plays between ranks 0 and 1; both call it with the same parameters. Returns
// one entry per sample, as seen by this rank. Throws when rank 0 does not get
// back what it sent.
std::vector<HalfRoundTrip> pingPong(::c10d::Backend& backend, int rank, const PingPong& parameters);

}  // namespace farandole::perf
