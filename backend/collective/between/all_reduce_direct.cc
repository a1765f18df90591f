#include "backend/collective/between/between_algorithms.h"

namespace farandole::collective::between {
namespace {

constexpr int kEverybody = -1;

// Chunk by chunk: exchange, reduce, and hand out the result while further chunks are
// exchanged. To one rank, or to everybody.
class DirectReduction {
 public:
  DirectReduction(Program& program, const Team& team, const Combiner& sum, Slice data, int gatherTo)
      : program_(program),
        team_(team),
        sum_(sum),
        data_(data),
        gatherTo_(gatherTo),
        chunks_((data.bytes / sum.elementSize() + team.size() - 1) / team.size() * sum.elementSize(),
                sum.elementSize()),
        scratch_(program.scratch(chunks_.depth() * (team.size() - 1) * chunks_.bytes())),
        exchanges_(chunks_.depth()) {}

  void build() {
    for (std::size_t chunk = 0; chunk < chunks_.depth(); ++chunk) exchange(chunk);
    for (std::size_t chunk = 0; chunk < chunks_.count(); ++chunk) {
      const Exchange posted = exchanges_[chunk % chunks_.depth()];
      if (isForHere()) recvResults(chunk, posted);
      sendResult(chunk, posted);
      if (chunk + chunks_.depth() < chunks_.count()) exchange(chunk + chunks_.depth());
    }
  }

 private:
  struct Exchange {
    std::vector<int> recvs;
    std::vector<int> sends;
  };

  bool isForHere() const { return gatherTo_ == kEverybody || gatherTo_ == team_.index; }
  Slice piece(int owner, std::size_t chunk) const {
    return chunks_.of(shardOf(owner, team_.size(), sum_.elementSize(), data_), chunk);
  }
  std::byte* place(std::size_t chunk, int distance) const {
    return scratch_ + (chunk % chunks_.depth() * (team_.size() - 1) + distance - 1) * chunks_.bytes();
  }

  void exchange(std::size_t chunk) {
    Exchange& posted = exchanges_[chunk % chunks_.depth()];
    // What is left in the place from `depth` chunks before has been sent on.
    for (const int message : resultSends_) program_.waitFor(message);
    resultSends_.clear();
    posted = {};
    for (int i = 1; i < team_.size(); ++i) {
      posted.recvs.push_back(
          program_.recv(team_.ranks[team_.before(i)], place(chunk, i), piece(team_.index, chunk).bytes));
    }
    for (int i = 1; i < team_.size(); ++i) {
      const Slice out = piece(team_.after(i), chunk);
      posted.sends.push_back(program_.send(team_.ranks[team_.after(i)], out.data, out.bytes));
    }
  }

  // They take the place of what this rank has given to the others.
  void recvResults(std::size_t chunk, const Exchange& posted) {
    for (const int message : posted.sends) program_.waitFor(message);
    for (int i = 1; i < team_.size(); ++i) {
      const Slice in = piece(team_.before(i), chunk);
      program_.recv(team_.ranks[team_.before(i)], in.data, in.bytes);
    }
  }

  void sendResult(std::size_t chunk, const Exchange& posted) {
    const Slice own = piece(team_.index, chunk);
    std::vector<const void*> parts(team_.size());
    for (int i = 1; i < team_.size(); ++i) parts[team_.before(i)] = place(chunk, i);
    parts[team_.index] = own.data;
    for (const int message : posted.recvs) program_.waitFor(message);
    // Where the result is not wanted, the data is left as it was.
    std::byte* const result = isForHere() ? own.data : place(chunk, 1);
    sum_.combineLast(program_, result, parts, team_.parts, own.bytes);
    for (int i = 1; i < team_.size(); ++i) {
      if (gatherTo_ != kEverybody && gatherTo_ != team_.after(i)) continue;
      const int message = program_.send(team_.ranks[team_.after(i)], result, own.bytes);
      if (!isForHere()) resultSends_.push_back(message);
    }
  }

  Program& program_;
  const Team& team_;
  const Combiner& sum_;
  const Slice data_;
  const int gatherTo_;
  const Chunks chunks_;
  std::byte* const scratch_;
  std::vector<Exchange> exchanges_;  // by place
  std::vector<int> resultSends_;     // from places
};

}  // namespace

void allReduceDirect(Program& program, const Team& team, const Combiner& sum, Slice data) {
  DirectReduction(program, team, sum, data, kEverybody).build();
}

void reduceDirect(Program& program, const Team& team, const Combiner& sum, int root, Slice data) {
  DirectReduction(program, team, sum, data, root).build();
}

}  // namespace farandole::collective::between
