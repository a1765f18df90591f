#include "pipeline/runtime/p2p_channel.h"

#include <utility>

namespace farandole::pipeline {

namespace {

void throwIfError(const Status& status) {
  if (!status.isOk()) C10_THROW_ERROR(DistBackendError, status.toString());
}

class Channel final : public P2pChannel {
 public:
  Channel(c10::intrusive_ptr<c10d::Backend> onHost, c10::intrusive_ptr<c10d::Backend> onDevice)
      : onHost_(std::move(onHost)),
        onDevice_(std::move(onDevice)),
        lines_(dynamic_cast<RepeatedMessages*>(onHost_.get())) {}

  void post(int peer, std::span<Message* const> batch) override {
    // Receives first: a rendezvous send finds its match the sooner.
    for (const bool isSend : {false, true}) {
      for (Message* message : batch) {
        if (message->isSend == isSend) start(peer, *message);
      }
    }
  }

 private:
  void start(int peer, Message& message) {
    const at::Tensor& tensor = message.tensor[0];
    if (lines_ != nullptr && tensor.is_cpu()) return startLine(peer, message);
    c10d::Backend& backend = tensor.is_cpu() ? *onHost_ : *onDevice_;
    message.work = message.isSend ? backend.send(message.tensor, peer, message.tag)
                                  : backend.recv(message.tensor, peer, message.tag);
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
                                        c10::intrusive_ptr<c10d::Backend> onDevice) {
  return std::make_unique<Channel>(std::move(onHost), std::move(onDevice));
}

}  // namespace farandole::pipeline
