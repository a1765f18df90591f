#include "backend/collective/between/between_algorithms.h"

namespace farandole::collective::between {

void broadcast(Algorithm algorithm, Program& program, const Team& team, int root, Slice data) {
  if (algorithm == Algorithm::kChain) return broadcastChain(program, team, root, data);
  broadcastBinomial(program, team, root, data);
}

void broadcastBinomial(Program& program, const Team& team, int root, Slice data) {
  const int size = team.size();
  const int relative = team.before(root);
  const auto rankAt = [&](int place) { return team.ranks[(place + root) % size]; };
  int mask = 1;
  for (; mask < size; mask <<= 1) {
    if ((relative & mask) == 0) continue;
    program.recv(rankAt(relative - mask), data.data, data.bytes);
    program.wait();
    break;
  }
  for (mask >>= 1; mask > 0; mask >>= 1) {
    if (relative + mask < size) program.send(rankAt(relative + mask), data.data, data.bytes);
  }
}

void broadcastChain(Program& program, const Team& team, int root, Slice data) {
  const Chunks chunks(data.bytes, 1);
  std::vector<int> recvs;
  if (team.index != root) {
    const int previous = team.ranks[team.before(1)];
    for (std::size_t i = 0; i < chunks.count(); ++i) {
      recvs.push_back(program.recv(previous, chunks.of(data, i).data, chunks.of(data, i).bytes));
    }
  }
  if (team.after(1) == root) return;
  for (std::size_t i = 0; i < chunks.count(); ++i) {
    if (!recvs.empty()) program.waitFor(recvs[i]);
    program.send(team.ranks[team.after(1)], chunks.of(data, i).data, chunks.of(data, i).bytes);
  }
}

void allGather(Algorithm algorithm, Program& program, const Team& team, const Blocks& blocks) {
  if (algorithm == Algorithm::kRing) return allGatherRing(program, team, blocks);
  allGatherDirect(program, team, blocks);
}

void allGatherDirect(Program& program, const Team& team, const Blocks& blocks) {
  for (int i = 1; i < team.size(); ++i) {
    const int source = team.before(i);
    for (const Slice& piece : blocks[source]) program.recv(team.ranks[source], piece.data, piece.bytes);
  }
  for (int i = 1; i < team.size(); ++i) {
    const int target = team.ranks[team.after(i)];
    for (const Slice& piece : blocks[team.index]) program.send(target, piece.data, piece.bytes);
  }
}

void allGatherRing(Program& program, const Team& team, const Blocks& blocks) {
  const auto forEachChunk = [&](int block, const auto& run) {
    for (const Slice& piece : blocks[block]) {
      const Chunks chunks(piece.bytes, 1);
      for (std::size_t i = 0; i < chunks.count(); ++i) run(chunks.of(piece, i));
    }
  };
  const int left = team.ranks[team.before(1)];
  const int right = team.ranks[team.after(1)];
  std::vector<int> recvs;
  for (int round = 1; round < team.size(); ++round) {
    forEachChunk(team.before(round),
                 [&](Slice chunk) { recvs.push_back(program.recv(left, chunk.data, chunk.bytes)); });
  }
  std::size_t next = 0;
  for (int round = 0; round < team.size() - 1; ++round) {
    forEachChunk(team.before(round), [&](Slice chunk) {
      if (round > 0) program.waitFor(recvs[next++]);
      program.send(right, chunk.data, chunk.bytes);
    });
  }
}

void barrier(Program& program, const Team& team) {
  for (int distance = 1; distance < team.size(); distance <<= 1) {
    program.recv(team.ranks[team.before(distance)], nullptr, 0);
    program.send(team.ranks[team.after(distance)], nullptr, 0);
    program.wait();
  }
}

}  // namespace farandole::collective::between
