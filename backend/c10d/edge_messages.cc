#include "backend/c10d/edge_messages.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "backend/c10d/contract.h"

namespace farandole::backend {

using collective::Communicator;
using p2p::MessageKind;
using transport::EdgeWord;
using transport::ProgressEngine;

namespace {

// All have one size, as a receive wants it: 512 bytes. What is left over are words without a flag.
constexpr std::size_t kWordsOfMessage = 32;
using Block = std::array<EdgeWord, kWordsOfMessage>;

}  // namespace

// A message that nobody waits for; it keeps itself while it is in flight.
class EdgeMessages::BlockOperation : public collective::Operation, public std::enable_shared_from_this<BlockOperation> {
 protected:
  BlockOperation(std::shared_ptr<Communicator> communicator, int peer)
      : Operation(std::move(communicator)), peer_(peer) {}

  bool isBackground() const final { return true; }
  std::span<collective::Message> messages() final { return {&message_, 1}; }
  void retain() final { self_ = shared_from_this(); }
  void release() final { const auto self = std::move(self_); }

  const int peer_;
  Block block_{};
  collective::Message message_;
  bool isPosted_ = false;

 private:
  std::shared_ptr<BlockOperation> self_;
};

class EdgeMessages::Telling final : public BlockOperation {
 public:
  Telling(std::shared_ptr<Communicator> communicator, int peer, std::span<const EdgeWord> words)
      : BlockOperation(std::move(communicator), peer) {
    std::ranges::copy(words, block_.begin());
  }

 protected:
  std::string describe() const override { return "telling " + communicator_->describe(peer_) + " of an edge"; }
  bool postNext() override {
    if (std::exchange(isPosted_, true)) return false;
    postSend(message_, peer_, MessageKind::kEdgeTalk, 0, block_.data(), sizeof block_);
    return true;
  }
};

// Never done while the peer and the group are there.
class EdgeMessages::Hearing final : public BlockOperation {
 public:
  Hearing(std::shared_ptr<Communicator> communicator, int peer, std::weak_ptr<EdgeMessages> owner)
      : BlockOperation(std::move(communicator), peer), owner_(std::move(owner)) {}

 protected:
  std::string describe() const override { return "hearing from " + communicator_->describe(peer_) + " of an edge"; }
  bool postNext() override {
    const auto owner = owner_.lock();
    if (owner == nullptr) return false;
    if (std::exchange(isPosted_, true)) {
      owner->hear(peer_, {block_.begin(), std::ranges::find(block_, 0, &EdgeWord::flags)});
    }
    postRecv(message_, peer_, MessageKind::kEdgeTalk, 0, block_.data(), sizeof block_);
    return true;
  }

 private:
  const std::weak_ptr<EdgeMessages> owner_;
};

void EdgeMessages::listen(int device, Listener listener) {
  const auto shared = std::make_shared<Listener>(std::move(listener));
  // What came early is heard before what comes now: nothing comes meanwhile.
  ProgressEngine::Access access(communicator_->engine());
  std::vector<std::pair<int, Words>> early;
  {
    std::lock_guard lock(mutex_);
    listeners_[device] = shared;
    early = std::exchange(early_[device], {});
  }
  for (const auto& [peer, words] : early) (*shared)(peer, words);
}

void EdgeMessages::open(int peer) {
  {
    std::lock_guard lock(mutex_);
    if (!opened_.insert(peer).second) return;
  }
  const auto hearing = std::make_shared<Hearing>(communicator_, peer, weak_from_this());
  ProgressEngine::Access access(communicator_->engine());
  hearing->start();
}

void EdgeMessages::tell(int peer, std::span<const EdgeWord> words) {
  for (; !words.empty(); words = words.subspan(std::min(words.size(), kWordsOfMessage))) {
    const auto telling =
        std::make_shared<Telling>(communicator_, peer, words.first(std::min(words.size(), kWordsOfMessage)));
    ProgressEngine::Access access(communicator_->engine());
    telling->start();
  }
}

void EdgeMessages::hear(int peer, Words words) {
  // What is told at once is of one device.
  const int device = words.front().device;
  std::shared_ptr<Listener> listener;
  {
    std::lock_guard lock(mutex_);
    const auto found = listeners_.find(device);
    if (found == listeners_.end()) return early_[device].push_back({peer, std::move(words)});
    listener = found->second;
  }
  (*listener)(peer, words);
}

Status EdgeMessages::describe(int peer, bool isSend, const transport::EdgeOrder::Difference& difference) const {
  const auto textOf = [this](int rank, bool sends, const transport::EdgeNote& note) {
    return communicator_->describe(rank) + (sends ? " sends " : " receives ") +
           describeElements(note.element, note.bytes) + " with tag " + std::to_string(note.tag);
  };
  return {StatusCode::kMismatch,
          textOf(communicator_->rank(), isSend, difference.ours) + ", but " + textOf(peer, !isSend, difference.theirs) +
              "; on CUDA the messages from one rank to another are matched by the order of issue, those of a batch by "
              "their tags if the other side's batch has the same messages: expected the same tag, dtype and size"};
}

}  // namespace farandole::backend
