#include "backend/transport/nccl/own_messages.h"

#include <algorithm>
#include <utility>

namespace farandole::transport {

Status OwnMessages::post(EdgeMessage message) {
  if (!message.isCaptured) (message.isSend ? sends_ : receives_)->add(message.operation);
  const auto found = std::ranges::find_if(waiting_, [&](const EdgeMessage& other) {
    return other.isSend != message.isSend && other.note.tag == message.note.tag;
  });
  if (found == waiting_.end()) {
    waiting_.push_back(std::move(message));
    return Status::ok();
  }
  const EdgeMessage other = std::move(*found);
  waiting_.erase(found);
  const EdgeMessage& send = message.isSend ? message : other;
  const EdgeMessage& receive = message.isSend ? other : message;
  if (send.note == receive.note) return copy(send, receive);
  Status mismatch = talk_.describe(message.peer, message.isSend, {message.note, other.note});
  other.operation->finish(mismatch);
  return mismatch;
}

Status OwnMessages::copy(const EdgeMessage& send, const EdgeMessage& receive) {
  if (stream_ == nullptr) {
    auto made = DeviceStream::make(cuda_, device_);
    if (!made) return made.status();
    stream_ = std::move(*made);
  }
  cudaStream_t const stream = stream_->handle();
  for (const EdgeMessage* message : {&send, &receive}) FARANDOLE_RETURN_IF_ERROR(message->ready->holdUp(stream));
  if (send.note.bytes > 0) {
    // Not cudaMemcpyAsync, which newer headers overload: one of that name cannot be in a table.
    const cudaError_t put = cuda_.memcpyPeerAsync(receive.data, device_, send.data, device_, send.note.bytes, stream);
    FARANDOLE_RETURN_IF_ERROR(cuda_.check(put, "cudaMemcpyPeerAsync"));
  }
  for (const EdgeMessage* message : {&send, &receive}) {
    auto end = events_->take();
    if (!end) return end.status();
    FARANDOLE_RETURN_IF_ERROR(end->record(stream, message->isCaptured));
    message->operation->launched(std::move(*end), stream);
  }
  return Status::ok();
}

std::deque<EdgeMessage> OwnMessages::takeWaiting() { return std::exchange(waiting_, {}); }

}  // namespace farandole::transport
