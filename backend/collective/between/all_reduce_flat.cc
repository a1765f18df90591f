#include "backend/collective/between/between_algorithms.h"

namespace farandole::collective::between {

void allReduceFlat(Program& program, const Team& team, const Combiner& sum, Slice data) {
  const Chunks chunks(data.bytes, sum.elementSize());
  const std::size_t others = team.size() - 1;
  std::byte* const scratch = program.scratch(chunks.depth() * others * chunks.bytes());
  const auto place = [&](std::size_t chunk, int distance) {
    return scratch + (chunk % chunks.depth() * others + distance - 1) * chunks.bytes();
  };
  std::vector<std::vector<int>> messages(chunks.depth());
  const auto exchange = [&](std::size_t chunk) {
    const Slice own = chunks.of(data, chunk);
    std::vector<int>& posted = messages[chunk % chunks.depth()];
    posted.clear();
    for (int i = 1; i < team.size(); ++i) {
      posted.push_back(program.recv(team.ranks[team.before(i)], place(chunk, i), own.bytes));
    }
    for (int i = 1; i < team.size(); ++i) {
      posted.push_back(program.send(team.ranks[team.after(i)], own.data, own.bytes));
    }
  };
  for (std::size_t chunk = 0; chunk < chunks.depth(); ++chunk) exchange(chunk);
  std::vector<const void*> parts(team.size());
  for (std::size_t chunk = 0; chunk < chunks.count(); ++chunk) {
    // Also for the sends: the result overwrites what they read.
    for (const int message : messages[chunk % chunks.depth()]) program.waitFor(message);
    const Slice own = chunks.of(data, chunk);
    for (int i = 1; i < team.size(); ++i) parts[team.before(i)] = place(chunk, i);
    parts[team.index] = own.data;
    sum.combineLast(program, own.data, parts, team.parts, own.bytes);
    if (chunk + chunks.depth() < chunks.count()) exchange(chunk + chunks.depth());
  }
}

}  // namespace farandole::collective::between
