#include "pipeline/runtime/p2p_channel.h"

#include <algorithm>
#include <array>
#include <utility>

namespace farandole::pipeline {

namespace {

void throwIfError(const Status& status) {
  if (!status.isOk()) C10_THROW_ERROR(DistBackendError, status.toString());
}

class Channel final : public P2pChannel {
 public:
  Channel(c10::intrusive_ptr<c10d::Backend> onHost, c10::intrusive_ptr<c10d::Backend> onDevice, bool hasOneQueue)
      : onHost_(std::move(onHost)),
        onDevice_(std::move(onDevice)),
        lines_(dynamic_cast<RepeatedMessages*>(onHost_.get())),
        hasOneQueue_(hasOneQueue) {}

  void post(int peer, std::span<Message* const> batch) override {
    if (hasOneQueue_ && std::ranges::any_of(batch, isOnDevice)) return postAsOne(peer, batch);
    // Receives first: a rendezvous send finds its match the sooner.
    for (const bool isSend : {false, true}) {
      for (Message* message : batch) {
        if (message->isSend == isSend) start(peer, *message);
      }
    }
  }

  // The first messages between two ranks connect them. Meanwhile others must not wait on the device for what comes
  // after them: CUDA frees memory only when the device has done all that it was given, and lets no other thread connect
  // until then. (An H100, two ranks: a group that was given up freed its memory beside a receive, whose sender waited
  // for a message of this rank that was not connected.)
  void connect(at::Device device, std::span<const int> peers) override {
    if (hasOneQueue_) return connectInTurn(device, peers);
    std::vector<Message> words(2 * peers.size());
    for (std::size_t i = 0; i < words.size(); ++i) {
      words[i].isSend = i % 2 != 0;
      words[i].tensor[0] = at::zeros({1}, at::TensorOptions(at::kByte).device(device));
      start(peers[i / 2], words[i]);
    }
    for (Message& word : words) word.wait();
  }

 private:
  // Connecting may block the host or keep messages back, past the order of the queue: so pairs of ranks connect one
  // after another in an order of all ranks. torch's NCCL makes what its batches go over with all ranks.
  void connectInTurn(at::Device device, std::span<const int> peers) {
    Message word;
    word.tensor[0] = at::zeros({1}, at::TensorOptions(at::kByte).device(device));
    onDevice_->allreduce(word.tensor)->wait();
    for (const int peer : peers) {
      for (const bool isUpwards : {true, false}) {
        word.isSend = (onDevice_->getRank() < peer) == isUpwards;
        postAsOne(peer, std::array{&word});
        word.wait();
        (void)word.tensor[0].cpu();  // the host waits for it
      }
    }
  }

  static bool isOnDevice(const Message* message) { return !message->tensor[0].is_cpu(); }

  void start(int peer, Message& message) {
    const at::Tensor& tensor = message.tensor[0];
    if (lines_ != nullptr && tensor.is_cpu()) return startLine(peer, message);
    c10d::Backend& backend = tensor.is_cpu() ? *onHost_ : *onDevice_;
    message.work = message.isSend ? backend.send(message.tensor, peer, message.tag)
                                  : backend.recv(message.tensor, peer, message.tag);
  }

  // In a queue a receive that comes first would hold up the send that the peer, which waits likewise, waits for.
  void postAsOne(int peer, std::span<Message* const> batch) {
    for (Message* message : batch) {
      if (!isOnDevice(message)) start(peer, *message);
    }
    onDevice_->startCoalescing();
    try {
      for (Message* message : batch) {
        if (isOnDevice(message)) start(peer, *message);
      }
    } catch (...) {
      try {
        onDevice_->endCoalescing();
      } catch (const std::exception&) {  // of the same cause
      }
      throw;
    }
    const c10::intrusive_ptr<c10d::Work> work = onDevice_->endCoalescing();
    for (Message* message : batch) {
      if (isOnDevice(message)) message->work = work;
    }
  }

  void startLine(int peer, Message& message) {
    const at::Tensor& tensor = message.tensor[0];
    const RepeatedMessageSpec spec{message.isSend, peer, message.tag, tensor.nbytes(),
                                   static_cast<int>(tensor.scalar_type())};
    if (message.line == nullptr || message.lineSpec != spec) {
      auto line = lines_->repeat(spec);
      throwIfError(line.status());
      message.line = std::move(line).value();
      message.lineSpec = spec;
    }
    message.isStarted = true;
    message.line->start(tensor.data_ptr());
  }

  const c10::intrusive_ptr<c10d::Backend> onHost_, onDevice_;
  RepeatedMessages* const lines_;  // of onHost_; null where it has none
  const bool hasOneQueue_;         // of onDevice_
};

}  // namespace

void Message::wait() {
  if (isStarted) {
    throwIfError(line->wait());
    isStarted = false;
  } else if (work) {
    work->wait();
    work.reset();
  }
}

bool Message::isDone() const {
  if (isStarted) return line->isDone();
  return !work || work->isCompleted();
}

void Message::release() {
  if (isStarted) {
    // Whoever still writes to the tensor, or reads it, needs its memory.
    line->keep(std::make_shared<at::Tensor>(std::move(tensor[0])));
    line.reset();
    isStarted = false;
  }
  work.reset();
  tensor[0].reset();
}

Message& Message::operator=(Message&& other) {
  if (this == &other) return *this;
  release();
  isSend = other.isSend;
  tag = other.tag;
  tensor.swap(other.tensor);
  work = std::move(other.work);
  line = std::move(other.line);
  lineSpec = other.lineSpec;
  isStarted = std::exchange(other.isStarted, false);
  return *this;
}

std::unique_ptr<P2pChannel> makeChannel(c10::intrusive_ptr<c10d::Backend> onHost,
                                        c10::intrusive_ptr<c10d::Backend> onDevice, bool hasOneQueue) {
  return std::make_unique<Channel>(std::move(onHost), std::move(onDevice), hasOneQueue);
}

}  // namespace farandole::pipeline
