#include "backend/collective/between/between_algorithms.h"
#include "backend/collective/between/folding.h"

namespace farandole::collective::between {
namespace {

// The shards that a rank has to do with, from `first` up to `last`, as memory.
Slice shards(int first, int last, int count, std::size_t elementSize, Slice data) {
  const Slice begin = shardOf(first, count, elementSize, data);
  const Slice end = shardOf(last - 1, count, elementSize, data);
  return {begin.data, static_cast<std::size_t>(end.data + end.bytes - begin.data)};
}

// In chunks: from some tens of megabytes on a message of its own would wait for its receiver first.
void exchange(Program& program, int partner, Slice in, Slice out, std::size_t elementSize) {
  const Chunks ins(in.bytes, elementSize);
  const Chunks outs(out.bytes, elementSize);
  for (std::size_t i = 0; i < ins.count(); ++i) program.recv(partner, ins.of(in, i).data, ins.of(in, i).bytes);
  for (std::size_t i = 0; i < outs.count(); ++i) program.send(partner, outs.of(out, i).data, outs.of(out, i).bytes);
}

}  // namespace

void allReduceRabenseifner(Program& program, const Team& team, const Combiner& sum, Slice data) {
  std::byte* const scratch = program.scratch(data.bytes);
  withFolding(program, team, sum, data, scratch, [&](const Folding& folding, int number) {
    const auto span = [&](int first, int last) { return shards(first, last, folding.power, sum.elementSize(), data); };
    int first = 0;
    int last = folding.power;
    for (int distance = folding.power / 2; distance > 0; distance /= 2) {
      const int partner = team.ranks[folding.indexOf(number ^ distance)];
      const bool isLower = (number & distance) == 0;
      const Slice lower = span(first, first + distance);
      const Slice upper = span(first + distance, last);
      const Slice kept = isLower ? lower : upper;
      const Slice given = isLower ? upper : lower;
      // In chunks, which are combined while others are on their way.
      const Chunks in(kept.bytes, sum.elementSize());
      const Chunks out(given.bytes, sum.elementSize());
      std::vector<int> received;
      for (std::size_t i = 0; i < in.count(); ++i) {
        received.push_back(program.recv(partner, scratch + i * in.bytes(), in.of(kept, i).bytes));
      }
      for (std::size_t i = 0; i < out.count(); ++i) {
        program.send(partner, out.of(given, i).data, out.of(given, i).bytes);
      }
      // Those whose numbers differ in the bits that have had their turn have been combined.
      const auto ranksOf = [&](int one) {
        return folding.parts(team, [&](int other) { return (other ^ one) % (2 * distance) == 0; });
      };
      const int ranks[] = {ranksOf(number & ~distance), ranksOf(number | distance)};
      for (std::size_t i = 0; i < in.count(); ++i) {
        program.waitFor(received[i]);
        std::byte* const own = in.of(kept, i).data;
        std::byte* const other = scratch + i * in.bytes();
        const void* const parts[] = {isLower ? own : other, isLower ? other : own};
        sum.combine(program, own, parts, ranks, in.of(kept, i).bytes);
      }
      program.wait();
      (isLower ? last : first) = first + distance;
    }
    const Slice own = span(first, last);
    sum.finish(program, own.data, own.bytes);
    for (int distance = 1; distance < folding.power; distance <<= 1) {
      const int partner = number ^ distance;
      const int theirs = partner / distance * distance;
      const int ours = number / distance * distance;
      exchange(program, team.ranks[folding.indexOf(partner)], span(theirs, theirs + distance),
               span(ours, ours + distance), sum.elementSize());
      program.wait();
    }
  });
}

}  // namespace farandole::collective::between
