#include "tests/perf/ping_pong.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

namespace farandole::perf {
namespace {

using Tensors = std::vector<at::Tensor>;
using Clock = std::chrono::steady_clock;

void roundTrip(::c10d::Backend& backend, int rank, Tensors& outgoing, Tensors& incoming) {
  const int peer = 1 - rank;
  if (rank == 0) {
    backend.send(outgoing, peer, 0)->wait();
    backend.recv(incoming, peer, 0)->wait();
  } else {
    backend.recv(incoming, peer, 0)->wait();
    backend.send(incoming, peer, 0)->wait();
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

std::vector<HalfRoundTrip> pingPong(::c10d::Backend& backend, int rank, const PingPong& parameters) {
  Tensors outgoing{at::randint(256, {parameters.bytes}, at::kByte)};
  Tensors incoming{at::empty_like(outgoing[0])};
  std::vector<Clock::time_point> ends(static_cast<std::size_t>(parameters.iterations));
  for (int i = 0; i < parameters.warmUp; ++i) roundTrip(backend, rank, outgoing, incoming);
  std::vector<HalfRoundTrip> samples;
  for (int sample = 0; sample < parameters.samples; ++sample) {
    if (rank == 0) incoming[0].zero_();
    const Clock::time_point start = Clock::now();
    for (Clock::time_point& end : ends) {
      roundTrip(backend, rank, outgoing, incoming);
      end = Clock::now();
    }
    samples.push_back(summarize(start, ends));
    TORCH_CHECK(rank != 0 || incoming[0].equal(outgoing[0]), "rank 0 got back other bytes than it sent");
  }
  return samples;
}

}  // namespace farandole::perf
