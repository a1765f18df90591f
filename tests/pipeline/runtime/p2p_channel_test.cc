#include "pipeline/runtime/p2p_channel.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "tests/pipeline/runtime/thread_backend.h"

namespace farandole::pipeline {
namespace {

constexpr std::chrono::seconds kPatience{20};

// What the ranks of a test know of each other: how many messages of each kind their queues have come to.
struct Queues {
  // source, destination, and which of those between the two; the sender's side, and the receiver's.
  using Side = std::tuple<int, int, int, bool>;

  std::mutex mutex;
  std::condition_variable changed;
  std::set<Side> begun;
  int numPrepared = 0;
};

// NCCL's one communicator and stream, for tensors without memory: what was posted starts when all before it has ended,
// and a batch as one; a message ends when both sides have started it. The host waits in wait() alone, as for a stream
// that it needs the results of.
class QueueBackend final : public c10d::Backend {
 public:
  QueueBackend(std::shared_ptr<Queues> queues, int rank, int size) : Backend(rank, size), queues_(std::move(queues)) {}
  ~QueueBackend() override {
    if (last_.valid()) last_.wait();
  }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int peer, int) override { return add(peer, true); }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>&, int peer, int) override { return add(peer, false); }

  void startCoalescing() override { isOpen_ = true; }

  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    isOpen_ = false;
    return run(std::exchange(batch_, {}));
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    const std::lock_guard lock(queues_->mutex);
    ++queues_->numPrepared;
    return c10::make_intrusive<Ended>(std::async(std::launch::deferred, [] { return true; }).share());
  }

 private:
  class Ended final : public c10d::Work {
   public:
    explicit Ended(std::shared_future<bool> end) : end_(std::move(end)) {}
    bool wait(std::chrono::milliseconds) override {
      if (!end_.get()) throw std::runtime_error("the other side did not come");
      return true;
    }

   private:
    std::shared_future<bool> end_;
  };

  c10::intrusive_ptr<c10d::Work> add(int peer, bool isSend) {
    const auto [source, destination] = isSend ? std::pair(getRank(), peer) : std::pair(peer, getRank());
    const Queues::Side side{source, destination, count_[{peer, isSend}]++, isSend};
    if (!isOpen_) return run({side});
    batch_.push_back(side);
    return nullptr;
  }

  c10::intrusive_ptr<c10d::Work> run(std::vector<Queues::Side> sides) {
    auto start = [before = last_, queues = queues_, sides = std::move(sides)] {
      if (before.valid() && !before.get()) return false;
      std::unique_lock lock(queues->mutex);
      queues->begun.insert(sides.begin(), sides.end());
      queues->changed.notify_all();
      return queues->changed.wait_for(lock, kPatience, [&] {
        return std::ranges::all_of(sides, [&](const Queues::Side& side) {
          const auto [source, destination, number, isSend] = side;
          return queues->begun.contains({source, destination, number, !isSend});
        });
      });
    };
    last_ = std::async(std::launch::async, std::move(start)).share();
    return c10::make_intrusive<Ended>(last_);
  }

  const std::shared_ptr<Queues> queues_;
  std::map<std::pair<int, bool>, int> count_;
  bool isOpen_ = false;
  std::vector<Queues::Side> batch_;
  std::shared_future<bool> last_;
};

Message onDevice(bool isSend, int tag) {
  Message message;
  message.isSend = isSend;
  message.tag = tag;
  message.tensor[0] = at::empty({4}, at::TensorOptions(at::kFloat).device(at::kMeta));
  return message;
}

TEST(P2pChannel, RanksThatSendEachOtherSeveralMessagesAtOnceDoNotHoldEachOtherUpInTheirQueues) {
  const auto queues = std::make_shared<Queues>();
  const auto world = std::make_shared<ThreadWorld>(2);
  const unsigned seed = std::random_device()();
  std::cout << "seed " << seed << '\n';
  std::mt19937 random(seed);
  std::vector<int> counts;  // of messages each way, for each batch
  for (int i = 0; i < 20; ++i) counts.push_back(static_cast<int>(random() % 4));
  counts.push_back(1);
  const auto run = [&](int rank) {
    const auto channel =
        makeChannel(c10::make_intrusive<ThreadBackend>(world, rank), c10::make_intrusive<QueueBackend>(queues, rank, 2),
                    /*hasOneQueue=*/true);
    std::vector<std::vector<Message>> batches;
    for (std::size_t i = 0; i + 1 < counts.size(); ++i) {
      std::vector<Message>& batch = batches.emplace_back();
      // Each way its own number, and on the CPU some of it.
      for (int j = 0; j < counts[i + static_cast<std::size_t>(rank)]; ++j) batch.push_back(onDevice(true, j));
      for (int j = 0; j < counts[i + 1 - static_cast<std::size_t>(rank)]; ++j) batch.push_back(onDevice(false, j));
      batch.emplace_back().isSend = rank == 0;
      batch.back().tensor[0] = at::full({1}, rank == 0 ? 7 : 0);
      std::vector<Message*> all;
      for (Message& message : batch) all.push_back(&message);
      channel->post(1 - rank, all);
    }
    for (std::vector<Message>& batch : batches) {
      for (Message& message : batch) message.wait();
      if (batch.back().tensor[0].item<int>() != 7) throw std::runtime_error("the CPU's message is lost");
    }
  };
  auto other = std::async(std::launch::async, run, 1);
  EXPECT_NO_THROW(run(0));
  EXPECT_NO_THROW(other.get());
}

TEST(P2pChannel, ConnectsBothWaysWithEachPeerAndWithOneQueueIsPreparedByAllRanks) {
  for (const bool isOne : {true, false}) {
    const auto queues = std::make_shared<Queues>();
    const auto world = std::make_shared<ThreadWorld>(3);
    // The number of sends and receives. Its tensors are on the CPU, so that they go where those go.
    const auto run = [&](int rank, const std::vector<int>& peers) {
      const auto onHost = c10::make_intrusive<ThreadBackend>(world, rank);
      makeChannel(onHost, c10::make_intrusive<QueueBackend>(queues, rank, 3), isOne)->connect(at::kCPU, peers);
      return onHost->posts;
    };
    auto first = std::async(std::launch::async, run, 0, std::vector{1});
    auto last = std::async(std::launch::async, run, 2, std::vector{1});
    const int inTheMiddle = run(1, {0, 2});
    EXPECT_EQ(inTheMiddle, 4);
    EXPECT_EQ(first.get(), 2);
    EXPECT_EQ(last.get(), 2);
    EXPECT_EQ(queues->numPrepared, isOne ? 3 : 0);
  }
}

}  // namespace
}  // namespace farandole::pipeline
