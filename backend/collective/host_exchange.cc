// Collectives that move data, on one host. In two steps: each rank tells what it has for whom, and
// the others take it, from its slot or out of its own memory; then they say that they have it. Nobody but the
// rank that gives needs to know beforehand how much it is; of two ranks both do (host_swap.h).
#include <algorithm>
#include <optional>

#include "backend/collective/host_algorithms.h"
#include "backend/collective/host_swap.h"
#include "backend/collective/selection.h"

namespace farandole::collective {
namespace {

// Pieces in a slot begin with a cache line.
constexpr std::size_t kLine = 64;

// What this rank hands out in a turn.
class Offers {
 public:
  Offers(Program& program, HostSegment& host, HostTurn turn)
      : program_(program), turn_(turn), canBeRead_(host.everybodyReads()) {}

  // Before the first signal. What the others cannot read is sent.
  void add(int entry, Slice data, Algorithm algorithm) {
    const std::size_t room = HostSegment::kSlotBytes - used_;
    const bool isRead = algorithm == Algorithm::kMemory && canBeRead_;
    Offer::Way way = isRead ? Offer::Way::kMemory : Offer::Way::kMessage;
    if (data.bytes <= room) way = Offer::Way::kSlot;
    program_.offer(turn_, entry, way, data.data, data.bytes, used_);
    if (way == Offer::Way::kSlot) used_ += std::min((data.bytes + kLine - 1) / kLine * kLine, room);
    stays_ = stays_ || way != Offer::Way::kSlot;
    given_.push_back({entry, data, way});
  }

  // After the first signal: what cannot be taken is sent. One entry may be for several ranks.
  void sendTo(int index, int entry) {
    const auto given = std::ranges::find(given_, entry, &Given::entry);
    if (given->way == Offer::Way::kMessage) program_.send(index, given->data.data, given->data.bytes);
  }

  // At the end: until the others have read what stayed in this rank's memory, or have begun to receive it; who
  // gives up is not waited for.
  void awaitTaken(int index = Program::kAllRanks) {
    if (stays_) program_.awaitRank(index, turn_.base + 2);
  }

 private:
  struct Given {
    int entry;
    Slice data;
    Offer::Way way;
  };

  Program& program_;
  const HostTurn turn_;
  const bool canBeRead_;
  bool stays_ = false;
  std::size_t used_ = 0;  // of the slot
  std::vector<Given> given_;
};

void takeFrom(Program& program, HostTurn turn, int index, int entry, Slice output, bool isOnlyReader = true) {
  program.meet(turn, index);
  program.take(turn, index, entry, output.data, output.bytes, isOnlyReader);
}

// Runs run(index) for all ranks but the own one, from the next one on: not all begin with the same.
template <typename Run>
void forOthers(const HostSegment& host, const Run& run) {
  for (int i = 1; i < host.size(); ++i) run((host.index() + i) % host.size());
}

}  // namespace

// The own part is copied while the others may not have come yet.
void allGatherOnHost(Program& program, const Topology& topology, Slice input, std::span<const Slice> outputs) {
  HostSegment& host = *topology.wholeSegment();
  const std::size_t longest = longestBytes(outputs);
  const std::size_t total = totalBytes(outputs);
  const Algorithm algorithm = choose(topology, CollectiveKind::kAllGather, total);
  const int rank = host.index();
  const Contract contract{CollectiveKind::kAllGather, 0, 0, total, longest};
  if (isSwap(host, algorithm)) {
    return swapOnHost(program, topology, algorithm, contract, {outputs[1 - rank], input, outputs[rank], input});
  }
  // Known to all: nothing is read from anybody's memory, and nobody needs to hear that it has been.
  const bool isShort = longest <= HostSegment::kSlotBytes;
  const HostTurn turn = beginTurn(program, host, contract, isShort ? 1 : 2);
  Offers offers(program, host, turn);
  offers.add(0, input, algorithm);
  program.signal(turn.base + 1);
  program.copy(outputs[rank].data, input.data, input.bytes);
  forOthers(host, [&](int index) { offers.sendTo(index, 0); });
  forOthers(host, [&](int index) { takeFrom(program, turn, index, 0, outputs[index], /*isOnlyReader=*/false); });
  if (isShort) return;
  program.signal(turn.base + 2);
  offers.awaitTaken();
}

void allToAllOnHost(Program& program, const Topology& topology, std::span<const Slice> outputs,
                    std::span<const Slice> inputs) {
  HostSegment& host = *topology.wholeSegment();
  const int rank = host.index();
  const Contract contract{CollectiveKind::kAllToAll, 0, 0, 0};
  const auto algorithmFor = [&](std::size_t bytes) { return choose(topology, CollectiveKind::kAllToAll, bytes); };
  std::optional<Algorithm> ofTwo;  // who know the longer one of what they give each other
  if (host.size() == 2) {
    ofTwo = algorithmFor(std::max(outputs[1 - rank].bytes, inputs[1 - rank].bytes));
    if (isSwap(host, *ofTwo)) {
      return swapOnHost(program, topology, *ofTwo, contract,
                        {outputs[1 - rank], inputs[1 - rank], outputs[rank], inputs[rank]});
    }
  }
  const HostTurn turn = beginTurn(program, host, contract, 2);
  Offers offers(program, host, turn);
  forOthers(host,
            [&](int index) { offers.add(index, inputs[index], ofTwo ? *ofTwo : algorithmFor(inputs[index].bytes)); });
  program.signal(turn.base + 1);
  program.copy(outputs[rank].data, inputs[rank].data, inputs[rank].bytes);
  forOthers(host, [&](int index) { offers.sendTo(index, index); });
  forOthers(host, [&](int index) { takeFrom(program, turn, index, rank, outputs[index]); });
  program.signal(turn.base + 2);
  offers.awaitTaken();
}

// Here and below, who takes nothing says at once that it has all; the root meets everybody, the others meet the root.
void gatherOnHost(Program& program, const Topology& topology, int root, Slice input, std::span<const Slice> outputs) {
  HostSegment& host = *topology.wholeSegment();
  const Contract contract{CollectiveKind::kGather, 0, static_cast<std::uint32_t>(root), 0};
  const HostTurn turn = beginTurn(program, host, contract, 2);
  if (host.index() == root) {
    program.signal(turn.base + 1);
    program.copy(outputs[root].data, input.data, input.bytes);
    forOthers(host, [&](int index) { takeFrom(program, turn, index, 0, outputs[index]); });
    return program.signal(turn.base + 2);
  }
  Offers offers(program, host, turn);
  offers.add(0, input, choose(topology, CollectiveKind::kGather, input.bytes));
  program.signal(turn.base + 2);
  offers.sendTo(root, 0);
  program.meet(turn, root);
  offers.awaitTaken(root);
}

void scatterOnHost(Program& program, const Topology& topology, int root, Slice output, std::span<const Slice> inputs) {
  HostSegment& host = *topology.wholeSegment();
  const Contract contract{CollectiveKind::kScatter, 0, static_cast<std::uint32_t>(root), 0};
  const HostTurn turn = beginTurn(program, host, contract, 2);
  if (host.index() != root) {
    program.signal(turn.base + 1);
    takeFrom(program, turn, root, host.index(), output);
    return program.signal(turn.base + 2);
  }
  Offers offers(program, host, turn);
  forOthers(host, [&](int index) {
    offers.add(index, inputs[index], choose(topology, CollectiveKind::kScatter, inputs[index].bytes));
  });
  program.signal(turn.base + 2);
  forOthers(host, [&](int index) { offers.sendTo(index, index); });
  program.copy(output.data, inputs[root].data, inputs[root].bytes);
  program.meet(turn);
  offers.awaitTaken();
}

}  // namespace farandole::collective
