// In a steady step the executor itself allocates nothing for an action.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backend/common/repeated_message.h"
#include "tests/pipeline/runtime/allocation_count.h"
#include "tests/pipeline/runtime/executor_model.h"

namespace farandole::pipeline {
namespace {

// A ThreadBackend whose allocations are not counted, with repeated messages over its sends and receives.
class UncountedBackend : public ThreadBackend {
 public:
  using ThreadBackend::ThreadBackend;

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int dst, int tag) override {
    const AllocationCount::Pause pause;
    return uncounted(ThreadBackend::send(tensors, dst, tag));
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int src, int tag) override {
    const AllocationCount::Pause pause;
    return uncounted(ThreadBackend::recv(tensors, src, tag));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override {
    const AllocationCount::Pause pause;
    return uncounted(ThreadBackend::allreduce(tensors, opts));
  }

 private:
  class Uncounted final : public c10d::Work {
   public:
    explicit Uncounted(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
    bool isCompleted() override { return work_->isCompleted(); }
    bool wait(std::chrono::milliseconds timeout) override {
      const AllocationCount::Pause pause;
      return work_->wait(timeout);
    }

   private:
    c10::intrusive_ptr<c10d::Work> work_;
  };

  static c10::intrusive_ptr<c10d::Work> uncounted(c10::intrusive_ptr<c10d::Work> work) {
    return c10::make_intrusive<Uncounted>(std::move(work));
  }
};

class RepeatingBackend final : public UncountedBackend, public RepeatedMessages {
 public:
  using UncountedBackend::UncountedBackend;

  Result<std::unique_ptr<RepeatedMessage>> repeat(const RepeatedMessageSpec& spec) override {
    return std::unique_ptr<RepeatedMessage>(std::make_unique<Line>(*this, spec));
  }

 private:
  class Line final : public RepeatedMessage {
   public:
    Line(RepeatingBackend& backend, const RepeatedMessageSpec& spec) : backend_(backend), spec_(spec) {}

    void start(void* data) override {
      const AllocationCount::Pause pause;
      const auto dtype = static_cast<at::ScalarType>(spec_.dtype);
      const auto count = static_cast<std::int64_t>(spec_.bytes / at::elementSize(dtype));
      std::vector<at::Tensor> tensors{at::from_blob(data, {count}, dtype)};
      work_ =
          spec_.isSend ? backend_.send(tensors, spec_.peer, spec_.tag) : backend_.recv(tensors, spec_.peer, spec_.tag);
    }
    Status wait() override {
      const AllocationCount::Pause pause;
      if (work_) work_->wait();
      work_.reset();
      return Status::ok();
    }
    bool isDone() const override { return !work_ || work_->isCompleted(); }
    void keep(std::shared_ptr<void>) override {}

   private:
    RepeatingBackend& backend_;
    const RepeatedMessageSpec spec_;
    c10::intrusive_ptr<c10d::Work> work_;
  };
};

// What steady steps of a rank allocate, all together.
struct Counted {
  std::int64_t ours = 0;
  std::string places;
};
constexpr int kStepsBefore = 6, kSteadySteps = 4;

template <typename Backend>
std::vector<Counted> countSteadySteps(const Plan& plan) {
  Model model(plan, 1);
  const auto world = std::make_shared<ThreadWorld>(plan.numRanks());
  std::vector<Counted> counted(plan.numRanks());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < plan.numRanks(); ++rank) {
    threads.emplace_back([&, rank] {
      ExecutorConfig config;
      for (int stage = 0; stage < plan.numStages; ++stage) {
        if (plan.rankOfStage[stage] != rank) continue;
        StageSpec spec = model.spec(stage);
        spec.forward = [forward = spec.forward](int microbatch, const std::vector<at::Tensor>& inputs,
                                                std::vector<at::Tensor>& outputs) {
          const AllocationCount::Pause pause;
          std::vector<at::Tensor> made;
          forward(microbatch, inputs, made);
          outputs.resize(made.size());
          std::ranges::move(made, outputs.begin());
        };
        config.stages.push_back(std::move(spec));
      }
      auto executor = Executor::create(plan, rank, c10::make_intrusive<Backend>(world, rank), std::move(config));
      const auto step = [&] {
        const Status status = (*executor)->step(false);
        ASSERT_TRUE(status.isOk()) << status.toString();
      };
      for (int i = 0; i < kStepsBefore; ++i) step();
      const AllocationCount count;
      for (int i = 0; i < kSteadySteps; ++i) step();
      counted[rank] = {count.ours(), count.places()};
    });
  }
  for (std::thread& thread : threads) thread.join();
  return counted;
}

// Where an I takes its graph apart, autograd's hooks ask for two lists for each node that it is parted at: of the
// hooks, in the node, and of what the hook returns. The stages of Model have one such node.
std::int64_t numListsOfHooks(const Plan& plan, int rank) {
  return 2 * kSteadySteps * std::ranges::count_if(plan.ranks[rank], [](const Action& action) {
           return action.kind == ActionKind::kBackwardInput && action.stage > 0;
         });
}

template <typename Backend>
void expectNothingForAnAction(std::string_view name) {
  for (const int numRanks : {1, 2}) {
    std::vector<Counted> fewer;
    std::vector<std::int64_t> fewerLists;
    for (const int microbatches : {8, 24}) {
      Result<Plan> made = makePlan(name, {numRanks, 2 * numRanks, microbatches, false});
      if (!made) made = makePlan(name, {numRanks, numRanks, microbatches, false});
      if (!made) break;  // DualPipe on one rank
      const std::vector<Counted> counted = countSteadySteps<Backend>(*lower(*made, ChannelModel::kTagged));
      std::vector<std::int64_t> lists;
      for (int rank = 0; rank < numRanks; ++rank) lists.push_back(numListsOfHooks(*made, rank));
      for (int rank = 0; !fewer.empty() && rank < numRanks; ++rank) {
        EXPECT_EQ(counted[rank].ours - lists[rank], fewer[rank].ours - fewerLists[rank])
            << name << ", rank " << rank << " of " << numRanks << ": with 8 and 24 microbatches;" << fewer[rank].places
            << "\nand" << counted[rank].places;
      }
      fewer = counted;
      fewerLists = lists;
    }
  }
}

TEST(ExecutorAllocations, AreTheSameForAnyNumberOfActions) {
  for (const std::string_view name : scheduleNames()) expectNothingForAnAction<RepeatingBackend>(name);
}

TEST(ExecutorAllocations, OverABackendWithoutRepeatedMessagesAreThoseOfTheBackend) {
  expectNothingForAnAction<UncountedBackend>("1F1B");
  expectNothingForAnAction<UncountedBackend>("ZBV");
}

TEST(ExecutorAllocations, AreSeen) {
  const AllocationCount count;
  std::vector<int> numbers(1000);
  numbers.push_back(1);
  EXPECT_EQ(count.ours(), 2) << count.places();
  const at::Tensor tensor = at::zeros({3});
  EXPECT_EQ(count.ours(), 2) << count.places();
  EXPECT_GT(count.theirs(), 0);
}

}  // namespace
}  // namespace farandole::pipeline
