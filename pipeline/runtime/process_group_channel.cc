#include "pipeline/runtime/process_group_channel.h"

namespace farandole::pipeline {

void ProcessGroupChannel::post(int peer, std::span<Message* const> batch) {
  // Receives first: a rendezvous send finds its match the sooner.
  for (Message* message : batch) {
    if (!message->isSend) message->work = backend_->recv(message->tensor, peer, message->tag);
  }
  for (Message* message : batch) {
    if (message->isSend) message->work = backend_->send(message->tensor, peer, message->tag);
  }
}

}  // namespace farandole::pipeline
