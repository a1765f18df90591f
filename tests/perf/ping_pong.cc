#include "tests/perf/ping_pong.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

namespace farandole::perf {
namespace {

using Tensors = std::vector<at::Tensor>;
using Clock = std::chrono::steady_clock;

// One rank's part in a round trip: `outgoing` there, `incoming` back.
template <typename Path>
class Player {
 public:
  Player(Path& path, int rank, const at::Tensor& outgoing, const at::Tensor& incoming)
      : path_(path), rank_(rank), outgoing_{rank == 0 ? outgoing : incoming}, incoming_{incoming} {}

  void send() { path_.send(outgoing_, 1 - rank_, 0)->wait(); }
  void recv() { path_.recv(incoming_, 1 - rank_, 0)->wait(); }

 private:
  Path& path_;
  const int rank_;
  Tensors outgoing_;
  Tensors incoming_;
};

template <>
class Player<RepeatedMessages> {
 public:
  Player(RepeatedMessages& path, int rank, const at::Tensor& outgoing, const at::Tensor& incoming)
      : out_(make(path, true, 1 - rank, outgoing)),
        in_(make(path, false, 1 - rank, incoming)),
        outgoing_((rank == 0 ? outgoing : incoming).data_ptr()),
        incoming_(incoming.data_ptr()) {}

  void send() { play(*out_, outgoing_); }
  void recv() { play(*in_, incoming_); }

 private:
  static std::unique_ptr<RepeatedMessage> make(RepeatedMessages& path, bool isSend, int peer,
                                               const at::Tensor& tensor) {
    auto message = path.repeat({isSend, peer, 0, tensor.nbytes(), static_cast<int>(tensor.scalar_type())});
    TORCH_CHECK(message.isOk(), message.status().toString());
    return std::move(message).value();
  }
  static void play(RepeatedMessage& message, void* data) {
    message.start(data);
    const Status status = message.wait();
    TORCH_CHECK(status.isOk(), status.toString());
  }

  const std::unique_ptr<RepeatedMessage> out_, in_;
  void* const outgoing_;
  void* const incoming_;
};

template <typename Path>
void roundTrip(Player<Path>& player, int rank) {
  if (rank == 0) player.send();
  player.recv();
  if (rank == 1) player.send();
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
  const at::Tensor outgoing = at::randint(256, {parameters.bytes}, at::kByte);
  const at::Tensor incoming = at::empty_like(outgoing);
  Player<Path> player(path, rank, outgoing, incoming);
  std::vector<Clock::time_point> ends(static_cast<std::size_t>(parameters.iterations));
  for (int i = 0; i < parameters.warmUp; ++i) roundTrip(player, rank);
  std::vector<HalfRoundTrip> samples;
  for (int sample = 0; sample < parameters.samples; ++sample) {
    if (rank == 0) incoming.zero_();
    const Clock::time_point start = Clock::now();
    for (Clock::time_point& end : ends) {
      roundTrip(player, rank);
      end = Clock::now();
    }
    samples.push_back(summarize(start, ends));
    const bool arrived = incoming.equal(outgoing);
    TORCH_CHECK(rank != 0 || arrived || !parameters.moves, "rank 0 got back other bytes than it sent");
  }
  return samples;
}

template std::vector<HalfRoundTrip> pingPong(::c10d::Backend& path, int rank, const PingPong& parameters);
template std::vector<HalfRoundTrip> pingPong(::c10d::ProcessGroup& path, int rank, const PingPong& parameters);
template std::vector<HalfRoundTrip> pingPong(RepeatedMessages& path, int rank, const PingPong& parameters);

}  // namespace farandole::perf
