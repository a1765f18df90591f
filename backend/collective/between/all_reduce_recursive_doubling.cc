#include "backend/collective/between/between_algorithms.h"
#include "backend/collective/between/folding.h"

namespace farandole::collective::between {

void allReduceRecursiveDoubling(Program& program, const Team& team, const Combiner& sum, Slice data) {
  std::byte* const scratch = program.scratch(data.bytes);
  withFolding(program, team, sum, data, scratch, [&](const Folding& folding, int number) {
    for (int distance = 1; distance < folding.power; distance <<= 1) {
      const int partner = team.ranks[folding.indexOf(number ^ distance)];
      program.recv(partner, scratch, data.bytes);
      program.send(partner, data.data, data.bytes);
      program.wait();
      // Both combine in the same order.
      const bool isLower = (number & distance) == 0;
      const void* const parts[] = {isLower ? data.data : scratch, isLower ? scratch : data.data};
      const auto ranksAt = [&](int first) {
        return folding.parts(team, [&](int other) { return other / distance == first / distance; });
      };
      const int lower = number & ~distance;
      const int ranks[] = {ranksAt(lower), ranksAt(lower | distance)};
      sum.combine(program, data.data, parts, ranks, data.bytes);
    }
    sum.finish(program, data.data, data.bytes);
  });
}

}  // namespace farandole::collective::between
