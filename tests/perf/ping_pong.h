#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "backend/common/repeated_message.h"

namespace farandole::perf {

struct PingPong {
  std::int64_t bytes;
  int warmUp;      // round trips that are not timed
  int iterations;  // round trips of one sample
  int samples;
  bool moves;  // data; then rank 0 must get back what it sent
};

// Half a round trip in seconds, over the round trips of one sample. The median
// is what the path costs; the mean also holds what the machine did meanwhile.
struct HalfRoundTrip {
  double median;
  double mean;
};

// Plays between ranks 0 and 1 through a c10d::Backend, a c10d::ProcessGroup or the
// RepeatedMessages of a backend; both call it with the same parameters. Returns one entry per sample, as seen by this
// rank. Throws when what comes back is not what it should be.
template <typename Path>
std::vector<HalfRoundTrip> pingPong(Path& path, int rank, const PingPong& parameters);

extern template std::vector<HalfRoundTrip> pingPong(::c10d::Backend& path, int rank, const PingPong& parameters);
extern template std::vector<HalfRoundTrip> pingPong(::c10d::ProcessGroup& path, int rank, const PingPong& parameters);
extern template std::vector<HalfRoundTrip> pingPong(RepeatedMessages& path, int rank, const PingPong& parameters);

}  // namespace farandole::perf
