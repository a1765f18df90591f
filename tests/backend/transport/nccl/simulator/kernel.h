#pragma once

#include <nccl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/backend/transport/nccl/simulator/reductions.h"
#include "tests/backend/transport/nccl/simulator/streams.h"

namespace farandole::testing {

struct Communicator;

struct CollectiveCall {
  enum class Kind : unsigned char { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter };

  bool matches(const CollectiveCall& other) const;
  std::string text() const;

  Kind kind = Kind::kAllReduce;
  const void* send = nullptr;
  void* receive = nullptr;
  std::size_t count = 0;  // as NCCL's call of this kind counts
  ncclDataType_t dtype = ncclInt8;
  Operator op;
  int root = -1;
};

struct MessageCall {
  bool sends = false;
  void* buffer = nullptr;
  std::size_t bytes = 0;
  int peer = -1;
};

// What one group does on one communicator.
struct KernelPlan {
  std::vector<CollectiveCall> collectives;  // one after the other, and in front of the messages
  std::vector<MessageCall> messages;        // all at once

  std::vector<MessageCall> with(int peer, bool sends) const;
};

// One rank's kernel of a group: at the head of its stream, and with no kernel of its communicator before it, it meets
// those of the other ranks (Clique), and is done when all of its calls are. Never done where the ranks disagree.
class Kernel : public Work {
 public:
  Kernel(Communicator& communicator, std::shared_ptr<const KernelPlan> plan)
      : communicator_(communicator), plan_(std::move(plan)) {}

  void launched() override;
  bool ready() const override;
  bool step(Lock& lock) override;
  std::shared_ptr<Work> again(Replay& replay) const override;

  // On the device, where it waits for other ranks.
  bool isRunning() const { return waiting_ && !ended_; }
  // The rest of it is not done.
  void abort() { ended_ = true; }
  // From the clique: the collective that it waited in, or all messages with one peer in one direction, went through.
  void collectiveDone();
  void messagesDone();

  Communicator& communicator() { return communicator_; }
  const KernelPlan& plan() const { return *plan_; }
  std::size_t nextCollective() const { return nextCollective_; }
  const CollectiveCall& collective() const { return plan_->collectives[nextCollective_]; }

 private:
  void endIfDone();

  Communicator& communicator_;
  const std::shared_ptr<const KernelPlan> plan_;
  std::uint64_t firstCollective_ = 0;              // its place in the communicator's order
  std::map<int, std::uint64_t> sends_, receives_;  // by peer: its place among the kernels that do so
  std::size_t nextCollective_ = 0;
  std::size_t openMessages_ = 0;
  bool waiting_ = false;  // for other ranks
  bool ended_ = false;
};

}  // namespace farandole::testing
