#include "tests/perf/ping_pong.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

namespace farandole::perf {
namespace {

using Tensors = std::vector<at::Tensor>;
using Clock = std::chrono::steady_clock;

template <typename Path>
void roundTrip(Path& path, int rank, Tensors& outgoing, Tensors& incoming) {
  const int peer = 1 - rank;
  if (rank == 0) {
    path.send(outgoing, peer, 0)->wait();
    path.recv(incoming, peer, 0)->wait();
  } else {
    path.recv(incoming, peer, 0)->wait();
    path.send(incoming, peer, 0)->wait();
  }
}

HalfRoundTrip summarize(Clock::time_point start, std::vector<Clock::time_point>& ends) {
  const double total = std::chrono::duration<double>(ends.back() - start).count();
  std::vector<double> trips;
  trips.reserve(ends.size());
  for (Clock::time_point end : ends) {
    trips.push_back(std::chrono::duration<double>(end - start).count());
    start = end;
  }
  const auto middle = trips.begin() + static_cast<std::ptrdiff_t>(trips.size() / 2);
  std::nth_element(trips.begin(), middle, trips.end());
  return {*middle / 2, total / static_cast<double>(trips.size()) / 2};
}

}  // namespace

template <typename Path>
std::vector<HalfRoundTrip> pingPong(Path& path, int rank, const PingPong& parameters) {
  Tensors outgoing{at::randint(256, {parameters.bytes}, at::kByte)};
  Tensors incoming{at::empty_like(outgoing[0])};
  std::vector<Clock::time_point> ends(static_cast<std::size_t>(parameters.iterations));
  for (int i = 0; i < parameters.warmUp; ++i) roundTrip(path, rank, outgoing, incoming);
  std::vector<HalfRoundTrip> samples;
  for (int sample = 0; sample < parameters.samples; ++sample) {
    if (rank == 0) incoming[0].zero_();
    const Clock::time_point start = Clock::now();
    for (Clock::time_point& end : ends) {
      roundTrip(path, rank, outgoing, incoming);
      end = Clock::now();
    }
    samples.push_back(summarize(start, ends));
    const bool arrived = incoming[0].equal(outgoing[0]);
    TORCH_CHECK(rank != 0 || arrived || !parameters.moves, "rank 0 got back other bytes than it sent");
  }
  return samples;
}

template std::vector<HalfRoundTrip> pingPong(::c10d::Backend& path, int rank, const PingPong& parameters);
template std::vector<HalfRoundTrip> pingPong(::c10d::ProcessGroup& path, int rank, const PingPong& parameters);

}  // namespace farandole::perf
