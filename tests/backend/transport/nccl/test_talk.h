#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/transport/nccl/edge_talk.h"

namespace farandole::transport::testing {

// What messages between CPUs are to processes: each peer's words come in order, some time later.
class TestTalk final : public EdgeTalk, public std::enable_shared_from_this<TestTalk> {
 public:
  // One for each rank.
  static std::vector<std::shared_ptr<TestTalk>> all(int size, std::uint64_t seed) {
    const auto post = std::make_shared<Post>();
    std::lock_guard lock(post->mutex);
    std::vector<std::shared_ptr<TestTalk>> talks;
    for (int rank = 0; rank < size; ++rank) {
      talks.push_back(std::make_shared<TestTalk>(post, rank, seed + rank, std::chrono::microseconds(seed % 3 * 500)));
      post->ranks.push_back(talks.back());
    }
    return talks;
  }

  struct Post {
    std::mutex mutex;
    std::vector<std::weak_ptr<TestTalk>> ranks;
  };
  TestTalk(std::shared_ptr<Post> post, int rank, std::uint64_t seed, std::chrono::microseconds delay)
      : post_(std::move(post)), rank_(rank), rng_(seed), delay_(delay) {
    mailman_ = std::thread([this] { deliver(); });
  }
  ~TestTalk() override {
    {
      std::lock_guard lock(mutex_);
      isOver_ = true;
    }
    changed_.notify_all();
    mailman_.join();
  }

  void listen(int device, Listener listener) override {
    std::lock_guard lock(hearing_);
    listeners_[device] = std::move(listener);
    for (const auto& [peer, words] : early_[device]) listeners_[device](peer, words);
    early_.erase(device);
  }
  void open(int) override {}
  void tell(int peer, std::span<const EdgeWord> words) override {
    std::lock_guard lock(mutex_);
    bag_.emplace_back(peer, std::vector(words.begin(), words.end()));
    changed_.notify_all();
  }
  Status describe(int peer, bool isSend, const EdgeOrder::Difference& difference) const override {
    const auto textOf = [](const EdgeNote& note) {
      return std::to_string(note.bytes) + " bytes with tag " + std::to_string(note.tag);
    };
    return {StatusCode::kMismatch, "rank " + std::to_string(rank_) + (isSend ? " sends " : " receives ") +
                                       textOf(difference.ours) + ", rank " + std::to_string(peer) + " " +
                                       textOf(difference.theirs)};
  }

 private:
  using Letter = std::pair<int, std::vector<EdgeWord>>;

  void deliver() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return isOver_ || !bag_.empty(); });
      if (isOver_) return;
      Letter letter = std::move(bag_.front());
      bag_.pop_front();
      const auto pause = std::chrono::microseconds(rng_() % static_cast<std::uint64_t>(delay_.count() + 1));
      lock.unlock();
      std::this_thread::sleep_for(pause);
      std::shared_ptr<TestTalk> peer;
      {
        std::lock_guard all(post_->mutex);
        peer = post_->ranks[letter.first].lock();
      }
      if (peer != nullptr) peer->hear(rank_, letter.second);
      peer.reset();
      lock.lock();
    }
  }
  void hear(int from, const std::vector<EdgeWord>& words) {
    std::lock_guard lock(hearing_);
    const int device = words.front().device;
    if (const auto found = listeners_.find(device); found != listeners_.end()) {
      found->second(from, words);
    } else {
      early_[device].push_back({from, words});
    }
  }

  const std::shared_ptr<Post> post_;
  const int rank_;
  std::mt19937_64 rng_;
  const std::chrono::microseconds delay_;
  std::mutex hearing_;
  std::map<int, Listener> listeners_;
  std::map<int, std::vector<Letter>> early_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Letter> bag_;
  bool isOver_ = false;
  std::thread mailman_;
};

}  // namespace farandole::transport::testing
