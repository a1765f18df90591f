#include "backend/collective/exchange_depth.h"

#include <algorithm>
#include <utility>

namespace farandole::collective {
namespace {

constexpr std::size_t kMost = 16;
// A way that holds less than this part of a chunk is not worth a second one under way.
constexpr double kTolerated = 0.25;
// What one TCP connection carries at most.
constexpr double kBytesPerSecond = 5e9;
// The first one waits for the other rank to come. Of the others the fastest counts, which no other program has delayed.
constexpr int kRounds = 5;

}  // namespace

std::size_t ExchangeDepth::next(Program& program, int peer, std::size_t chunkBytes) {
  if (!std::exchange(isBegun_, true)) measure(program, peer);
  const double delay = std::chrono::duration<double>(delay_.load()).count();
  const double onTheWay = kBytesPerSecond * delay / static_cast<double>(chunkBytes);
  return std::min(1 + static_cast<std::size_t>(onTheWay + 1 - kTolerated), kMost);
}

void ExchangeDepth::measure(Program& program, int peer) {
  std::byte* const bytes = program.scratch(2);
  for (int round = 0; round < kRounds; ++round) {
    program.call([this] { began_ = Clock::now(); });
    const int received = program.recv(peer, bytes, 1);
    const int sent = program.send(peer, bytes + 1, 1);
    program.waitFor(received);
    program.waitFor(sent);
    if (round > 0) program.call([this] { least_ = std::min(least_, Clock::now() - began_); });
  }
  program.call([this] { delay_ = least_; });
}

}  // namespace farandole::collective
