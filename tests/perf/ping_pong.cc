#include "tests/perf/ping_pong.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "backend/observe/tick_clock.h"

namespace farandole::perf {
namespace {

using Tensors = std::vector<at::Tensor>;
using Ticks = observe::TickClock::Ticks;

constexpr double kNano = 1e-9;

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

HalfRoundTrip summarize(const observe::TickClock& clock, Ticks start, const std::vector<Ticks>& ends) {
  const observe::TickClock::Converter nanosOf(clock);
  std::vector<double> trips;
  trips.reserve(ends.size());
  std::int64_t before = nanosOf(start);
  const double total = static_cast<double>(nanosOf(ends.back()) - before);
  for (const Ticks end : ends) {
    const std::int64_t now = nanosOf(end);
    trips.push_back(static_cast<double>(now - before));
    before = now;
  }
  const auto middle = trips.begin() + static_cast<std::ptrdiff_t>(trips.size() / 2);
  std::nth_element(trips.begin(), middle, trips.end());
  return {*middle / 2 * kNano, total / static_cast<double>(trips.size()) / 2 * kNano};
}

}  // namespace

template <typename Path>
std::vector<HalfRoundTrip> pingPong(Path& path, int rank, const PingPong& parameters) {
  const at::Tensor outgoing = at::randint(256, {parameters.bytes}, at::kByte);
  const at::Tensor incoming = at::empty_like(outgoing);
  Player<Path> player(path, rank, outgoing, incoming);
  // As ucx_perftest, which reads the processor's counter after each message: steady_clock costs twice as much.
  const observe::TickClock clock;
  std::vector<Ticks> ends(static_cast<std::size_t>(parameters.iterations));
  for (int i = 0; i < parameters.warmUp; ++i) roundTrip(player, rank);
  std::vector<HalfRoundTrip> samples;
  for (int sample = 0; sample < parameters.samples; ++sample) {
    if (rank == 0) incoming.zero_();
    const Ticks start = clock.now();
    for (Ticks& end : ends) {
      roundTrip(player, rank);
      end = clock.now();
    }
    samples.push_back(summarize(clock, start, ends));
    const bool arrived = incoming.equal(outgoing);
    TORCH_CHECK(rank != 0 || arrived || !parameters.moves, "rank 0 got back other bytes than it sent");
  }
  return samples;
}

template std::vector<HalfRoundTrip> pingPong(::c10d::Backend& path, int rank, const PingPong& parameters);
template std::vector<HalfRoundTrip> pingPong(::c10d::ProcessGroup& path, int rank, const PingPong& parameters);
template std::vector<HalfRoundTrip> pingPong(RepeatedMessages& path, int rank, const PingPong& parameters);

}  // namespace farandole::perf
