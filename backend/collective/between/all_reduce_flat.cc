#include "backend/collective/between/between_algorithms.h"
#include "backend/collective/exchange_depth.h"

namespace farandole::collective::between {

void allReduceFlat(Program& program, const Team& team, const Combiner& sum, Slice data) {
  const Chunks chunks(data.bytes, sum.elementSize());
  const std::size_t others = team.size() - 1;
  const bool isMeasured = team.size() == 2 && team.depth != nullptr && chunks.count() > 1;
  const std::size_t most =
      isMeasured ? team.depth->next(program, team.ranks[team.after(1)], chunks.bytes()) : Chunks::kDepth;
  const std::size_t depth = std::min(chunks.count(), most);
  const std::size_t places = std::min(chunks.count(), depth + 1);  // one is being combined
  std::byte* const scratch = program.scratch(places * others * chunks.bytes());
  const auto place = [&](std::size_t chunk, int distance) {
    return scratch + (chunk % places * others + distance - 1) * chunks.bytes();
  };
  std::vector<std::vector<int>> messages(depth);
  const auto exchange = [&](std::size_t chunk) {
    const Slice own = chunks.of(data, chunk);
    std::vector<int>& posted = messages[chunk % depth];
    posted.clear();
    for (int i = 1; i < team.size(); ++i) {
      posted.push_back(program.recv(team.ranks[team.before(i)], place(chunk, i), own.bytes));
    }
    for (int i = 1; i < team.size(); ++i) {
      posted.push_back(program.send(team.ranks[team.after(i)], own.data, own.bytes));
    }
  };
  for (std::size_t chunk = 0; chunk < depth; ++chunk) exchange(chunk);
  std::vector<const void*> parts(team.size());
  for (std::size_t chunk = 0; chunk < chunks.count(); ++chunk) {
    // Also for the sends: the result overwrites what they read.
    for (const int message : messages[chunk % depth]) program.waitFor(message);
    if (chunk + depth < chunks.count()) exchange(chunk + depth);
    const Slice own = chunks.of(data, chunk);
    for (int i = 1; i < team.size(); ++i) parts[team.before(i)] = place(chunk, i);
    parts[team.index] = own.data;
    sum.combineLast(program, own.data, parts, team.parts, own.bytes);
  }
}

}  // namespace farandole::collective::between
