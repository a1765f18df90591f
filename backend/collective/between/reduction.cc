#include "backend/collective/between/between_algorithms.h"

namespace farandole::collective::between {

void allReduce(Algorithm algorithm, Program& program, const Team& team, const Combiner& sum, Slice data) {
  switch (algorithm) {
    case Algorithm::kRecursiveDoubling: return allReduceRecursiveDoubling(program, team, sum, data);
    case Algorithm::kRabenseifner: return allReduceRabenseifner(program, team, sum, data);
    case Algorithm::kDirect: return allReduceDirect(program, team, sum, data);
    case Algorithm::kRing: return allReduceRing(program, team, sum, data);
    default: return allReduceFlat(program, team, sum, data);
  }
}

void reduce(Algorithm algorithm, Program& program, const Team& team, const Combiner& sum, int root, Slice data) {
  if (algorithm == Algorithm::kDirect) return reduceDirect(program, team, sum, root, data);
  reduceFlat(program, team, sum, root, data);
}

void reduceFlat(Program& program, const Team& team, const Combiner& sum, int root, Slice data) {
  if (team.index != root) {
    program.send(team.ranks[root], data.data, data.bytes);
    return;
  }
  std::byte* place = program.scratch(data.bytes * (team.size() - 1));
  std::vector<const void*> parts(team.size(), data.data);
  for (int i = 1; i < team.size(); ++i, place += data.bytes) {
    program.recv(team.ranks[team.before(i)], place, data.bytes);
    parts[team.before(i)] = place;
  }
  program.wait();
  sum.combineLast(program, data.data, parts, team.parts, data.bytes);
}

void reduceScatterDirect(Program& program, const Team& team, const Combiner& sum, Slice output,
                         std::span<const Slice> inputs) {
  const Chunks chunks(output.bytes, sum.elementSize());
  const std::size_t others = team.size() - 1;
  std::byte* const scratch = program.scratch(chunks.depth() * others * chunks.bytes());
  const auto place = [&](std::size_t chunk, int distance) {
    return scratch + (chunk % chunks.depth() * others + distance - 1) * chunks.bytes();
  };
  std::vector<std::vector<int>> messages(chunks.depth());
  const auto recv = [&](std::size_t chunk) {
    std::vector<int>& posted = messages[chunk % chunks.depth()];
    posted.clear();
    for (int i = 1; i < team.size(); ++i) {
      posted.push_back(program.recv(team.ranks[team.before(i)], place(chunk, i), chunks.of(output, chunk).bytes));
    }
  };
  for (std::size_t chunk = 0; chunk < chunks.depth(); ++chunk) recv(chunk);
  for (int i = 1; i < team.size(); ++i) {
    const Slice input = inputs[team.after(i)];
    const Chunks theirs(input.bytes, sum.elementSize());
    for (std::size_t chunk = 0; chunk < theirs.count(); ++chunk) {
      program.send(team.ranks[team.after(i)], theirs.of(input, chunk).data, theirs.of(input, chunk).bytes);
    }
  }
  std::vector<const void*> parts(team.size());
  for (std::size_t chunk = 0; chunk < chunks.count(); ++chunk) {
    for (const int message : messages[chunk % chunks.depth()]) program.waitFor(message);
    for (int i = 1; i < team.size(); ++i) parts[team.before(i)] = place(chunk, i);
    parts[team.index] = chunks.of(inputs[team.index], chunk).data;
    const Slice out = chunks.of(output, chunk);
    sum.combineLast(program, out.data, parts, team.parts, out.bytes);
    if (chunk + chunks.depth() < chunks.count()) recv(chunk + chunks.depth());
  }
}

}  // namespace farandole::collective::between
