// Collectives that move data, on one host. In two steps: each rank tells what it has for whom, and
// the others take it, from its slot or out of its own memory; then they say that they have it. Nobody but the
// rank that gives needs to know beforehand how much it is.
#include <algorithm>
#include <functional>

#include "backend/collective/host_algorithms.h"

namespace farandole::collective {
namespace {

// Up to here two ranks copy data into the slot and out again, with one meeting; above, it was faster to read it
// where it is (data fresh from the cache: 8 KiB 1.8 us against 2.2, 16 KiB 3.1 against 3.3, 32 KiB 6.1 against 4.8).
constexpr std::size_t kCopiedBytesOfTwo = 8 << 10;
// Where one rank is idle while the other one reads, a message from here on is copied by both.
constexpr std::size_t kSharedBytes = 512 << 10;
constexpr std::size_t kAnySize = ~std::size_t{0};
// Pieces in a slot begin with a cache line.
constexpr std::size_t kLine = 64;

// Among more ranks the slot is used for what it has room for: meetings are dearer, with more ranks than cores by far
// (four on two cores, 16 KiB from each to all: 70 to 100 us, read where it is 124 to 146).
std::size_t copiedBytes(const HostSegment& host) {
  return host.size() == 2 ? kCopiedBytesOfTwo : HostSegment::kSlotBytes;
}

// What this rank hands out in a turn.
class Offers {
 public:
  // What has `sentFrom` bytes or more is sent as a message, as is everything that the others cannot read.
  Offers(Program& program, HostSegment& host, HostTurn turn, std::size_t sentFrom)
      : program_(program),
        turn_(turn),
        canBeRead_(host.everybodyReads()),
        copied_(canBeRead_ ? copiedBytes(host) : HostSegment::kSlotBytes),
        sentFrom_(sentFrom) {}

  // Before the first signal.
  void add(int entry, Slice data) {
    const std::size_t room = HostSegment::kSlotBytes - used_;
    Offer::Way way = canBeRead_ && data.bytes < sentFrom_ ? Offer::Way::kMemory : Offer::Way::kMessage;
    if (data.bytes <= std::min(copied_, room)) way = Offer::Way::kSlot;
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
  const std::size_t copied_;  // bytes, at most
  const std::size_t sentFrom_;
  bool stays_ = false;
  std::size_t used_ = 0;  // of the slot
  std::vector<Given> given_;
};

void takeFrom(Program& program, HostTurn turn, int index, int entry, Slice output) {
  program.meet(turn, index);
  program.take(turn, index, entry, output.data, output.bytes);
}

// Runs run(index) for all ranks but the own one, from the next one on: not all begin with the same.
template <typename Run>
void forOthers(const HostSegment& host, const Run& run) {
  for (int i = 1; i < host.size(); ++i) run((host.index() + i) % host.size());
}

}  // namespace

// The own part is copied while the others may not have come yet.
void allGatherOnHost(Program& program, HostSegment& host, Slice input, std::span<const Slice> outputs) {
  const std::size_t longest = longestBytes(outputs);
  // Known to all: nothing is read from anybody's memory, and nobody needs to hear that it has been.
  const bool isShort = longest <= copiedBytes(host);
  const Contract contract{CollectiveKind::kAllGather, 0, 0, totalBytes(outputs), longest};
  const HostTurn turn = beginTurn(program, host, contract, isShort ? 1 : 2);
  Offers offers(program, host, turn, kAnySize);
  offers.add(0, input);
  program.signal(turn.base + 1);
  program.copy(outputs[host.index()].data, input.data, input.bytes);
  forOthers(host, [&](int index) { offers.sendTo(index, 0); });
  forOthers(host, [&](int index) { takeFrom(program, turn, index, 0, outputs[index]); });
  if (isShort) return;
  program.signal(turn.base + 2);
  offers.awaitTaken();
}

void allToAllOnHost(Program& program, HostSegment& host, std::span<const Slice> outputs,
                    std::span<const Slice> inputs) {
  const int rank = host.index();
  const HostTurn turn = beginTurn(program, host, {CollectiveKind::kAllToAll, 0, 0, 0}, 2);
  Offers offers(program, host, turn, kAnySize);
  forOthers(host, [&](int index) { offers.add(index, inputs[index]); });
  program.signal(turn.base + 1);
  program.copy(outputs[rank].data, inputs[rank].data, inputs[rank].bytes);
  forOthers(host, [&](int index) { offers.sendTo(index, index); });
  forOthers(host, [&](int index) { takeFrom(program, turn, index, rank, outputs[index]); });
  program.signal(turn.base + 2);
  offers.awaitTaken();
}

// Here and below, who takes nothing says at once that it has all; the root meets everybody, the others meet the root.
void gatherOnHost(Program& program, HostSegment& host, int root, Slice input, std::span<const Slice> outputs) {
  const Contract contract{CollectiveKind::kGather, 0, static_cast<std::uint32_t>(root), 0};
  const HostTurn turn = beginTurn(program, host, contract, 2);
  if (host.index() == root) {
    program.signal(turn.base + 1);
    program.copy(outputs[root].data, input.data, input.bytes);
    forOthers(host, [&](int index) { takeFrom(program, turn, index, 0, outputs[index]); });
    return program.signal(turn.base + 2);
  }
  Offers offers(program, host, turn, kSharedBytes);
  offers.add(0, input);
  program.signal(turn.base + 2);
  offers.sendTo(root, 0);
  program.meet(turn, root);
  offers.awaitTaken(root);
}

void scatterOnHost(Program& program, HostSegment& host, int root, Slice output, std::span<const Slice> inputs) {
  const Contract contract{CollectiveKind::kScatter, 0, static_cast<std::uint32_t>(root), 0};
  const HostTurn turn = beginTurn(program, host, contract, 2);
  if (host.index() != root) {
    program.signal(turn.base + 1);
    takeFrom(program, turn, root, host.index(), output);
    return program.signal(turn.base + 2);
  }
  Offers offers(program, host, turn, kSharedBytes);
  forOthers(host, [&](int index) { offers.add(index, inputs[index]); });
  program.signal(turn.base + 2);
  forOthers(host, [&](int index) { offers.sendTo(index, index); });
  program.copy(output.data, inputs[root].data, inputs[root].bytes);
  program.meet(turn);
  offers.awaitTaken();
}

// Read where it is and combined at once (32 KiB for each: 3.3 us, new data 5.8; through windows 9.8 and 5.8).
void reduceScatterOfTwo(Program& program, HostSegment& host, const Reduction& reduction, Slice output,
                        std::span<const Slice> inputs) {
  const int rank = host.index();
  const Contract contract{CollectiveKind::kReduceScatter, reduction.code, 0, totalBytes(inputs), longestBytes(inputs)};
  const HostTurn turn = beginTurn(program, host, contract, 2);
  Offers offers(program, host, turn, kAnySize);
  offers.add(1 - rank, inputs[1 - rank]);
  program.signal(turn.base + 1);
  program.meet(turn);
  const Slice own = inputs[rank];
  const std::less<> before;
  const bool overlap = before(output.data, own.data + own.bytes) && before(own.data, output.data + output.bytes);
  std::byte* const into = overlap ? program.scratch(output.bytes) : output.data;
  program.takeAndReduce(turn, 1 - rank, rank, reduction.function, output.data, own.data, into, output.bytes,
                        reduction.elementSize);
  program.signal(turn.base + 2);
  offers.awaitTaken();
}

}  // namespace farandole::collective
