#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "backend/collective/buffer_pool.h"
#include "backend/collective/host_segment.h"
#include "backend/collective/operation.h"

namespace farandole::collective {

// dst[i] = sources[0][i] + sources[1][i] + ... in that order, for `count`
// elements and whatever "+" is. `dst` may be one of the sources.
using ReduceFunction = void (*)(void* dst, const void* const* sources, int numSources, std::size_t count);

// The average of sources, of which source i is itself the average of ranks[i] ranks' parts. `dst` may be one of them.
using AverageFunction = void (*)(void* dst, const void* const* sources, const int* ranks, int numSources,
                                 std::size_t count);

// What one rank does for a collective: posts, waits for all that was posted,
// local work. Built by the algorithms, carried out by a ProgramOperation.
class Program {
 public:
  Program() { steps_.reserve(kUsualSteps); }

  // Return the message's number in the program. What one rank sends to another
  // arrives in the order in which it is received there.
  int send(int peer, const void* data, std::size_t bytes);
  int recv(int peer, void* data, std::size_t bytes);
  // What comes after it starts when all that was posted before it is done.
  void wait();
  // When this message is done; others may be under way.
  void waitFor(int message);
  void copy(void* dst, const void* src, std::size_t bytes);
  // The same past the caches, of what does not overlap.
  void stream(void* dst, const void* src, std::size_t bytes);
  void reduce(ReduceFunction function, void* dst, std::span<const void* const> sources, std::size_t count);
  // The same, and leaves a copy of the result.
  void reduceAndCopy(ReduceFunction function, void* dst, void* copy, std::span<const void* const> sources,
                     std::size_t count, std::size_t elementSize);
  void average(AverageFunction function, void* dst, std::span<const void* const> sources, std::span<const int> ranks,
               std::size_t count);
  // In place, of data in which `parts` are combined: Reduction::finish.
  void finish(ReduceFunction function, void* data, int parts, std::size_t count);
  // Anything else that is local, with the transport held; throws nothing.
  void call(std::function<void()> work);
  // What is built only once the program has come here, of steps that post no messages.
  void later(std::function<void(Program&)> build);

  // Over the memory that the ranks of a host share. A program that uses it runs
  // when those before it have ended, and takes its turn when it is built.
  HostTurn takeTurn(HostSegment& host, std::uint64_t steps);
  // Says that this rank has come to `value`.
  void signal(std::uint64_t value);
  // What comes after it starts when all ranks of the host, or one, have come to
  // `value`. Here and below a rank is named by its index in the segment.
  void await(std::uint64_t value);
  void awaitRank(int index, std::uint64_t value);
  // What this rank does in the turn, which the others' is compared with: told
  // with the first signal, compared by the next await.
  void setContract(HostTurn turn, const Contract& contract);
  // Awaits the first step of all ranks, or of one, and compares their contracts with the own one.
  void meet(HostTurn turn, int index = kAllRanks);
  // Compares those of the collective before, where this rank has not met all others in it.
  void compareLast();

  // Hands out data in the turn, before its first signal: entry `entry` of this rank's offers. `place`: in the slot.
  void offer(HostTurn turn, int entry, Offer::Way way, const void* data, std::size_t bytes, std::size_t place);
  // Takes what the other one has handed out, once this rank has met it: by whichever way it has chosen. `isOnlyReader`:
  // no other rank takes it too.
  void take(HostTurn turn, int index, int entry, void* data, std::size_t bytes, bool isOnlyReader);

  static constexpr int kAllRanks = -1;

  // Of a slot or window, when its only reader has read it (claimLines); and copied to where it belongs at once.
  void claim(std::byte* data, std::size_t bytes);
  void copyAndClaim(void* dst, std::byte* src, std::size_t bytes);
  // Into a slot or window whose only reader claims it (copyToClaimed).
  void put(std::byte* dst, const void* src, std::size_t bytes);

  // About so many steps are to come: their list then grows but once.
  void reserve(std::size_t steps) { steps_.reserve(steps_.size() + steps); }

  // A collective that this is all or a part of, where not all ranks share memory: its messages carry a mark of it.
  void noteCall(const Contract& call) { noted_.push_back(call); }

  // Memory that lives as long as the program.
  std::byte* scratch(std::size_t bytes);

  int numMessages() const { return numMessages_; }
  bool usesHost() const { return host_ != nullptr; }

 private:
  friend class ProgramOperation;
  static constexpr std::size_t kUsualSteps = 12;  // of a short collective: its vector grows no more
  enum class Kind : std::uint8_t {
    kSend,
    kRecv,
    kWait,
    kWaitFor,
    kCopy,
    kStream,
    kReduce,
    kReduceAndCopy,
    kAverage,
    kCall,
    kLater,
    kTell,
    kSignal,
    kAwait,
    kMeet,
    kCompare,
    kOffer,
    kTake,
    kClaim,
    kCopyAndClaim,
    kPut
  };
  struct Step {
    Kind kind;
    int peer;            // a rank; of the host's steps its index there, or kAllRanks; or the number of sources
    const void* source;  // or null
    void* destination;
    std::size_t size;  // bytes, or elements of a reduction, or a counter's value, or the number of a message or call
    std::size_t firstSource;  // or the place of an offer
    union {
      ReduceFunction function;
      AverageFunction average;
    };
    void* copy = nullptr;  // of the destination; or what is copied of an offer, the slot that it is in, what is claimed
    std::size_t elementSize = 0;  // or the place of what an average's sources are of, in ranks_
    Offer::Way way = Offer::Way::kSlot;
    bool isOnlyReader = false;  // of what is taken
  };

  std::vector<Step> steps_;
  std::vector<const void*> sources_;
  std::vector<int> ranks_;
  std::vector<std::function<void()>> calls_;
  std::vector<std::function<void(Program&)>> later_;
  std::vector<BufferPool::Buffer> scratch_;
  // The step `place`, which is kLater: its steps follow it.
  void buildLater(std::size_t place);

  bool isLate_ = false;  // while it is built later, when other collectives may have been called
  int numMessages_ = 0;
  HostSegment* host_ = nullptr;
  std::vector<std::pair<HostTurn, Contract>> contracts_;
  std::vector<Contract> noted_;
};

// A collective in flight.
class ProgramOperation : public Operation {
 public:
  // `sequence` tells the collectives of a communicator apart: equal on all ranks.
  void setProgram(Program program, std::uint32_t sequence);
  // The same for what goes on with a call that was started before, and perhaps other calls since.
  void continueWith(Program program, std::uint32_t sequence);
  bool usesHost() const { return program_.usesHost(); }
  // That this rank did not finish it does not end the group: its caller tells the others.
  void endAlone() { endsAlone_ = true; }

 protected:
  using Operation::describe;
  using Operation::Operation;
  // Of Reduction::code: "SUM of float".
  virtual std::string describeReduction(std::uint16_t code) const;
  // Of the program, which goes on no more.
  std::vector<BufferPool::Buffer> takeScratch() { return std::move(program_.scratch_); }
  bool postNext() final;
  bool isBlocked() const final { return blocked_ || waitsForTurn_; }
  bool isPolled() const final { return usesHost() && program_.numMessages() == 0; }
  std::string circumstances() const final;
  std::string missingRanks() const final;
  void abandoning(const Status& status) final;
  void abandoned(const Status& status) final;
  Status mismatch(const Message& message) final;
  std::span<Message> messages() final { return {messages_.get(), static_cast<std::size_t>(posted_)}; }

 private:
  friend class Communicator;

  // When it is started, as it is called.
  void noteCalls();
  // While it is blocked: whether the ranks that it waits for have come, or one of them never will.
  bool isReady() const;
  // Whether others may come to wait for what it has not done yet, or somebody for its end.
  bool isUrgent() const;
  // The index of a rank of the host that it waits for after they have met; or -1.
  int awaitedIndex() const;
  // The index of the first of the ranks that a step waits for that has not come; -1 when all have.
  int missing(const Program::Step& step) const;
  std::string describe(const Contract& contract) const;
  // The last ones up to this.
  std::string describeCalls() const;
  Status compareContracts(const Program::Step& step) const;
  void reduceAndCopy(const Program::Step& step);
  // Goes on with it; false when there is more to take, and it has not failed.
  bool take(const Program::Step& step);

  bool endsAlone_ = false;
  bool blocked_ = false;
  bool waitsForTurn_ = false;
  bool hasTurn_ = false;
  Program program_;
  std::uint32_t sequence_ = 0;
  std::uint32_t mark_ = 0;      // of the calls up to this one
  std::uint64_t numCalls_ = 0;  // of them
  std::size_t next_ = 0;
  std::unique_ptr<Message[]> messages_;
  int posted_ = 0;
  std::size_t taken_ = 0;  // bytes, of the step that takes
};

}  // namespace farandole::collective
