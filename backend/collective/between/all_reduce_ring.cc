#include "backend/collective/between/between_algorithms.h"

namespace farandole::collective::between {
namespace {

// Receives are numbered through: `rounds` rounds of reduce-scatter, then as many of
// all-gather, each of all chunks of a shard. What arrives is sent on at once, so the
// chunks of all rounds are under way one after the other.
class RingReduction {
 public:
  RingReduction(Program& program, const Team& team, const Combiner& sum, Slice data)
      : program_(program),
        team_(team),
        sum_(sum),
        data_(data),
        chunks_((data.bytes / sum.elementSize() + team.size() - 1) / team.size() * sum.elementSize(),
                sum.elementSize()),
        perRound_(chunks_.count()),
        half_((team.size() - 1) * perRound_),
        scratch_(program.scratch(chunks_.depth() * chunks_.bytes())) {}

  void build() {
    for (std::size_t n = 0; n < chunks_.depth(); ++n) postRecv(n);
    for (std::size_t c = 0; c < perRound_; ++c) sendOn(team_.index, c);
    for (std::size_t n = 0; n < 2 * half_; ++n) {
      program_.waitFor(recvs_[n]);
      if (n < half_) add(n);
      if (n + perRound_ < 2 * half_) sendOn(shardAt(n), n % perRound_);
      if (n + chunks_.depth() < 2 * half_) postRecv(n + chunks_.depth());
    }
  }

 private:
  // In the first half shards move one place on with each round, the second begins with what this rank has finished.
  int shardAt(std::size_t n) const {
    const int round = static_cast<int>(n % half_ / perRound_);
    return team_.before(n < half_ ? round + 1 : round);
  }
  Slice pieceAt(std::size_t n) const {
    return chunks_.of(shardOf(shardAt(n), team_.size(), sum_.elementSize(), data_), n % perRound_);
  }
  std::byte* place(std::size_t n) const { return scratch_ + n % chunks_.depth() * chunks_.bytes(); }

  void postRecv(std::size_t n) {
    const Slice piece = pieceAt(n);
    // Results take the place of what this rank gave in the same round of the first half.
    if (n >= half_) program_.waitFor(sends_[n - half_]);
    const int left = team_.ranks[team_.before(1)];
    recvs_.push_back(program_.recv(left, n < half_ ? place(n) : piece.data, piece.bytes));
  }

  void add(std::size_t n) {
    const Slice piece = pieceAt(n);
    const void* const parts[] = {place(n), piece.data};
    // What has come is of all since the shard began its way.
    const int ranks[] = {team_.partsBefore(1, static_cast<int>(n / perRound_) + 1), team_.parts[team_.index]};
    if (n < half_ - perRound_) {
      sum_.combine(program_, piece.data, parts, ranks, piece.bytes);
    } else {
      sum_.combineLast(program_, piece.data, parts, ranks, piece.bytes);
    }
  }

  void sendOn(int shard, std::size_t chunk) {
    const Slice piece = chunks_.of(shardOf(shard, team_.size(), sum_.elementSize(), data_), chunk);
    sends_.push_back(program_.send(team_.ranks[team_.after(1)], piece.data, piece.bytes));
  }

  Program& program_;
  const Team& team_;
  const Combiner& sum_;
  const Slice data_;
  const Chunks chunks_;
  const std::size_t perRound_;
  const std::size_t half_;
  std::byte* const scratch_;
  std::vector<int> recvs_;
  std::vector<int> sends_;
};

}  // namespace

void allReduceRing(Program& program, const Team& team, const Combiner& sum, Slice data) {
  if (team.size() == 1) return sum.finish(program, data.data, data.bytes);
  RingReduction(program, team, sum, data).build();
}

}  // namespace farandole::collective::between
