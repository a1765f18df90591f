#include "backend/collective/program.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "backend/collective/communicator.h"
#include "backend/common/with_subnormals.h"
#include "backend/transport/shm/cache_lines.h"
#include "backend/transport/shm/streaming_copy.h"

namespace farandole::collective {
namespace {

// After copying so much others get a chance to use the transport (128 KiB: an all_to_all of 256 KiB takes 2 % longer).
constexpr std::size_t kWorkBytes = 512 << 10;
// What a reduction counts for: it may take far longer (an all_reduce of 1 MiB of float32 34 us, of float16 916).
constexpr std::size_t kReducedWork = 8;
// What is copied right after it was reduced, while the first-level cache has it.
constexpr std::size_t kCopyBytes = 8 << 10;
// What is read from another process at once (256 KiB: an all_gather of 1 MiB takes 5 % longer).
constexpr std::size_t kReadBytes = 512 << 10;
// From here on a local copy goes past the caches (measured: all_gather of 64 MiB
// 19.4 ms -> 14.8, of 16 MiB 3.9 -> 3.5; of 4 MiB no difference).
constexpr std::size_t kStreamedBytes = 4 << 20;

void copyLocally(void* to, const void* from, std::size_t bytes) {
  const auto target = reinterpret_cast<std::uintptr_t>(to);
  const auto source = reinterpret_cast<std::uintptr_t>(from);
  const bool overlaps = std::max(target, source) - std::min(target, source) < bytes;
  if (bytes < kStreamedBytes || overlaps) {
    std::memmove(to, from, bytes);
  } else {
    transport::streamingCopy(to, from, bytes);
  }
}

}  // namespace

int Program::send(int peer, const void* data, std::size_t bytes) {
  steps_.push_back({Kind::kSend, peer, data, nullptr, bytes, 0, nullptr});
  return numMessages_++;
}

int Program::recv(int peer, void* data, std::size_t bytes) {
  steps_.push_back({Kind::kRecv, peer, nullptr, data, bytes, 0, nullptr});
  return numMessages_++;
}

void Program::wait() { steps_.push_back({Kind::kWait, 0, nullptr, nullptr, 0, 0, nullptr}); }

void Program::waitFor(int message) {
  steps_.push_back({Kind::kWaitFor, 0, nullptr, nullptr, static_cast<std::size_t>(message), 0, nullptr});
}

void Program::copy(void* dst, const void* src, std::size_t bytes) {
  if (dst == src || bytes == 0) return;
  steps_.push_back({Kind::kCopy, 0, src, dst, bytes, 0, nullptr});
}

void Program::stream(void* dst, const void* src, std::size_t bytes) {
  if (dst == src || bytes == 0) return;
  steps_.push_back({Kind::kStream, 0, src, dst, bytes, 0, nullptr});
}

void Program::reduce(ReduceFunction function, void* dst, std::span<const void* const> sources, std::size_t count) {
  if (count == 0) return;
  steps_.push_back({Kind::kReduce, static_cast<int>(sources.size()), nullptr, dst, count, sources_.size(), function});
  sources_.insert(sources_.end(), sources.begin(), sources.end());
}

void Program::reduceAndCopy(ReduceFunction function, void* dst, void* copy, std::span<const void* const> sources,
                            std::size_t count, std::size_t elementSize) {
  if (count == 0) return;
  steps_.push_back({Kind::kReduceAndCopy, static_cast<int>(sources.size()), nullptr, dst, count, sources_.size(),
                    function, copy, elementSize});
  sources_.insert(sources_.end(), sources.begin(), sources.end());
}

void Program::average(AverageFunction function, void* dst, std::span<const void* const> sources,
                      std::span<const int> ranks, std::size_t count) {
  if (count == 0) return;
  Step step{Kind::kAverage, static_cast<int>(sources.size()), nullptr, dst, count, sources_.size(), nullptr};
  step.average = function;
  step.elementSize = ranks_.size();
  steps_.push_back(step);
  sources_.insert(sources_.end(), sources.begin(), sources.end());
  ranks_.insert(ranks_.end(), ranks.begin(), ranks.end());
}

void Program::finish(ReduceFunction function, void* data, int parts, std::size_t count) {
  if (count == 0) return;
  steps_.push_back({Kind::kReduce, parts, nullptr, data, count, sources_.size(), function});
  sources_.push_back(data);
}

void Program::call(std::function<void()> work) {
  steps_.push_back({Kind::kCall, 0, nullptr, nullptr, calls_.size(), 0, nullptr});
  calls_.push_back(std::move(work));
}

void Program::later(std::function<void(Program&)> build) {
  steps_.push_back({Kind::kLater, 0, nullptr, nullptr, later_.size(), 0, nullptr});
  later_.push_back(std::move(build));
}

void Program::buildLater(std::size_t place) {
  const auto next = steps_.begin() + static_cast<std::ptrdiff_t>(place) + 1;
  const std::vector<Step> rest(next, steps_.end());
  const std::size_t build = steps_[place].size;
  steps_.resize(place + 1);
  isLate_ = true;
  later_[build](*this);
  isLate_ = false;
  steps_.insert(steps_.end(), rest.begin(), rest.end());
}

std::byte* Program::scratch(std::size_t bytes) {
  return scratch_.emplace_back(BufferPool::instance().take(bytes)).data();
}

void ProgramOperation::continueWith(Program program, std::uint32_t sequence) {
  program.noted_.clear();
  setProgram(std::move(program), sequence);
}

void ProgramOperation::setProgram(Program program, std::uint32_t sequence) {
  program_ = std::move(program);
  sequence_ = sequence;
  if (program_.numMessages() > 0) messages_ = std::make_unique<Message[]>(program_.numMessages());
}

HostTurn Program::takeTurn(HostSegment& host, std::uint64_t steps) {
  host_ = &host;
  return host.nextTurn(steps);
}

void Program::signal(std::uint64_t value) { steps_.push_back({Kind::kSignal, 0, nullptr, nullptr, value, 0, nullptr}); }

void Program::await(std::uint64_t value) { awaitRank(kAllRanks, value); }

void Program::awaitRank(int index, std::uint64_t value) {
  steps_.push_back({Kind::kAwait, index, nullptr, nullptr, value, 0, nullptr});
}

void Program::setContract(HostTurn turn, const Contract& contract) {
  host_->noteCall(turn, contract);
  contracts_.emplace_back(turn, contract);
  steps_.push_back({Kind::kTell, 0, nullptr, nullptr, 0, contracts_.size() - 1, nullptr});
}

void Program::meet(HostTurn turn, int index) {
  const auto contract =
      std::ranges::find(contracts_, turn.base, [](const auto& contract) { return contract.first.base; });
  const auto place = static_cast<std::size_t>(contract - contracts_.begin());
  steps_.push_back({Kind::kMeet, index, nullptr, nullptr, turn.base + 1, place, nullptr});
  if (!isLate_ && (index == kAllRanks || host_->size() == 2)) host_->noteMeeting(turn);
}

void Program::compareLast() {
  const HostSegment::Call& last = host_->lastCall();
  if (last.meetsAll) return;
  contracts_.emplace_back(last.turn, last.contract);
  steps_.push_back({Kind::kCompare, kAllRanks, nullptr, nullptr, 0, contracts_.size() - 1, nullptr});
}

void Program::offer(HostTurn turn, int entry, Offer::Way way, const void* data, std::size_t bytes, std::size_t place) {
  std::byte* const copy = way == Offer::Way::kSlot && bytes > 0 ? host_->slot(host_->index(), turn) + place : nullptr;
  if (way == Offer::Way::kMemory) place = reinterpret_cast<std::size_t>(data);
  steps_.push_back(
      {Kind::kOffer, 0, data, &host_->offer(host_->index(), turn, entry), bytes, place, nullptr, copy, 0, way});
}

void Program::take(HostTurn turn, int index, int entry, void* data, std::size_t bytes, bool isOnlyReader) {
  steps_.push_back({Kind::kTake, index, &host_->offer(index, turn, entry), data, bytes, 0, nullptr,
                    host_->slot(index, turn), 0, Offer::Way::kSlot, isOnlyReader});
  ++numMessages_;
}

void Program::claim(std::byte* data, std::size_t bytes) {
  steps_.push_back({Kind::kClaim, 0, nullptr, data, bytes, 0, nullptr});
}

void Program::copyAndClaim(void* dst, std::byte* src, std::size_t bytes) {
  steps_.push_back({Kind::kCopyAndClaim, 0, nullptr, dst, bytes, 0, nullptr, src});
}

void Program::put(std::byte* dst, const void* src, std::size_t bytes) {
  if (bytes > 0) steps_.push_back({Kind::kPut, 0, src, dst, bytes, 0, nullptr});
}

void ProgramOperation::abandoning(const Status& status) {
  if (usesHost()) communicator_->giveUp(status);
}

void ProgramOperation::abandoned(const Status& status) {
  if (!endsAlone_) communicator_->abandon(status);
}

void ProgramOperation::reduceAndCopy(const Program::Step& step) {
  const WithSubnormals exact;
  const std::span<const void*> sources(&program_.sources_[step.firstSource], static_cast<std::size_t>(step.peer));
  const std::size_t block = kCopyBytes / step.elementSize;
  auto* dst = static_cast<std::byte*>(step.destination);
  auto* copy = static_cast<std::byte*>(step.copy);
  for (std::size_t left = step.size; left > 0;) {
    const std::size_t count = std::min(block, left);
    const std::size_t bytes = count * step.elementSize;
    step.function(dst, sources.data(), step.peer, count);
    std::memcpy(copy, dst, bytes);
    for (const void*& source : sources) source = static_cast<const std::byte*>(source) + bytes;
    dst += bytes;
    copy += bytes;
    left -= count;
  }
}

bool ProgramOperation::take(const Program::Step& step) {
  const Offer& offer = *static_cast<const Offer*>(step.source);
  auto* const to = static_cast<std::byte*>(step.destination);
  if (offer.way == Offer::Way::kMessage) {  // its size is compared where it arrives, and its sender is told
    if (Status status = communicator_->canCome(step.peer); !status) {
      fail(status);
    } else {
      postRecv(messages_[posted_++], communicator_->rankOnHost(step.peer), p2p::MessageKind::kCollective, sequence_, to,
               step.size, mark_);
    }
    return true;
  }
  if (offer.bytes != step.size) {
    const std::string who = communicator_->describe(communicator_->rankOnHost(step.peer));
    fail(sizesDiffer(/*isSend=*/false, who, offer.bytes, step.size));
    return true;
  }
  if (offer.way == Offer::Way::kSlot) {
    std::byte* const data = static_cast<std::byte*>(step.copy) + offer.place;
    if (step.isOnlyReader) {
      transport::copyAndClaim(to, data, step.size);
    } else if (step.size > 0) {
      std::memcpy(to, data, step.size);
    }
    return true;
  }
  const std::size_t bytes = std::min(kReadBytes, step.size - taken_);
  const auto* const from = reinterpret_cast<const std::byte*>(offer.place);
  const Status status = communicator_->readFrom(step.peer, to + taken_, from + taken_, bytes);
  taken_ += bytes;
  if (status && taken_ < step.size) return false;
  taken_ = 0;
  if (!status) fail(status);
  return true;
}

bool ProgramOperation::postNext() {
  blocked_ = false;
  if (!program_.noted_.empty()) noteCalls();
  if (usesHost() && next_ == 0 && !hasTurn_) {
    hasTurn_ = communicator_->begin(*this);
    if (!hasTurn_) return true;
  }
  std::size_t worked = 0;
  for (; next_ < program_.steps_.size(); ++next_) {
    const Program::Step& step = program_.steps_[next_];
    switch (step.kind) {
      case Program::Kind::kSend:
        postSend(messages_[posted_++], step.peer, p2p::MessageKind::kCollective, sequence_, step.source, step.size,
                 mark_);
        break;
      case Program::Kind::kRecv:
        postRecv(messages_[posted_++], step.peer, p2p::MessageKind::kCollective, sequence_, step.destination, step.size,
                 mark_);
        break;
      case Program::Kind::kCopy:
        copyLocally(step.destination, step.source, step.size);
        worked += step.size;
        break;
      case Program::Kind::kStream:
        transport::streamingCopy(step.destination, step.source, step.size);
        worked += step.size;
        break;
      case Program::Kind::kReduce: {
        const WithSubnormals exact;
        step.function(step.destination, &program_.sources_[step.firstSource], step.peer, step.size);
      }
        worked += kReducedWork * step.size;
        break;
      case Program::Kind::kAverage: {
        const WithSubnormals exact;
        step.average(step.destination, &program_.sources_[step.firstSource], &program_.ranks_[step.elementSize],
                     step.peer, step.size);
      }
        worked += kReducedWork * step.size;
        break;
      case Program::Kind::kReduceAndCopy:
        reduceAndCopy(step);
        worked += kReducedWork * step.size * step.elementSize;
        break;
      case Program::Kind::kCall: program_.calls_[step.size](); break;
      case Program::Kind::kLater: program_.buildLater(next_); break;
      case Program::Kind::kWait: ++next_; return true;
      case Program::Kind::kWaitFor:
        if (messages_[step.size].isPending) {
          await(messages_[step.size]);
          return true;
        }
        break;
      case Program::Kind::kTell: {
        const auto& [turn, contract] = program_.contracts_[step.firstSource];
        program_.host_->setContract(turn, contract);
        break;
      }
      case Program::Kind::kOffer:
        *static_cast<Offer*>(step.destination) = {step.size, step.firstSource, step.way};
        if (step.copy != nullptr) std::memcpy(step.copy, step.source, step.size);
        break;
      case Program::Kind::kTake:
        if (!take(step)) {  // others get a chance; it goes on with the next poll
          blocked_ = true;
          return true;
        }
        worked += step.size;
        break;
      case Program::Kind::kClaim: transport::claimLines(static_cast<std::byte*>(step.destination), step.size); break;
      case Program::Kind::kCopyAndClaim:
        transport::copyAndClaim(step.destination, static_cast<std::byte*>(step.copy), step.size);
        worked += step.size;
        break;
      case Program::Kind::kPut:
        transport::copyToClaimed(static_cast<std::byte*>(step.destination), step.source, step.size);
        worked += step.size;
        break;
      case Program::Kind::kSignal: communicator_->signal(step.size); break;
      case Program::Kind::kAwait:
      case Program::Kind::kMeet:
        if (const int index = missing(step); index >= 0) {
          if (Status status = communicator_->canCome(index); !status) {
            fail(status);
            return false;
          }
          blocked_ = true;
          return true;
        }
        [[fallthrough]];
      case Program::Kind::kCompare:
        if (step.kind != Program::Kind::kAwait) {
          if (Status status = compareContracts(step); !status) {
            fail(status);
            return false;
          }
        }
        if (worked >= kWorkBytes) {  // it is ready, and goes on with the next poll
          blocked_ = true;
          return true;
        }
        break;
    }
    if (isDone()) return false;  // a message failed at once
  }
  if (hasTurn_) {
    hasTurn_ = false;
    communicator_->end(*this);
  }
  return false;
}

}  // namespace farandole::collective
