#include "backend/collective/program.h"

#include <cstring>

namespace farandole::collective {

void Program::send(int peer, const void* data, std::size_t bytes) {
  steps_.push_back({Kind::kSend, peer, data, nullptr, bytes, 0, nullptr});
  ++numMessages_;
}

void Program::recv(int peer, void* data, std::size_t bytes) {
  steps_.push_back({Kind::kRecv, peer, nullptr, data, bytes, 0, nullptr});
  ++numMessages_;
}

void Program::wait() { steps_.push_back({Kind::kWait, 0, nullptr, nullptr, 0, 0, nullptr}); }

void Program::copy(void* dst, const void* src, std::size_t bytes) {
  if (dst == src || bytes == 0) return;
  steps_.push_back({Kind::kCopy, 0, src, dst, bytes, 0, nullptr});
}

void Program::reduce(ReduceFunction function, void* dst, std::span<const void* const> sources, std::size_t count) {
  if (count == 0) return;
  steps_.push_back({Kind::kReduce, static_cast<int>(sources.size()), nullptr, dst, count, sources_.size(), function});
  sources_.insert(sources_.end(), sources.begin(), sources.end());
}

std::byte* Program::scratch(std::size_t bytes) {
  return scratch_.emplace_back(BufferPool::instance().take(bytes)).data();
}

void ProgramOperation::setProgram(Program program, std::uint32_t sequence) {
  program_ = std::move(program);
  sequence_ = sequence;
  messages_ = std::make_unique<Message[]>(program_.numMessages());
}

bool ProgramOperation::postNext() {
  for (; next_ < program_.steps_.size(); ++next_) {
    const Program::Step& step = program_.steps_[next_];
    switch (step.kind) {
      case Program::Kind::kSend:
        postSend(messages_[posted_++], step.peer, p2p::MessageKind::kCollective, sequence_, step.source, step.size);
        break;
      case Program::Kind::kRecv:
        postRecv(messages_[posted_++], step.peer, p2p::MessageKind::kCollective, sequence_, step.destination,
                 step.size);
        break;
      case Program::Kind::kCopy: std::memmove(step.destination, step.source, step.size); break;
      case Program::Kind::kReduce:
        step.function(step.destination, &program_.sources_[step.firstSource], step.peer, step.size);
        break;
      case Program::Kind::kWait: ++next_; return true;
    }
    if (isDone()) return false;  // a message failed at once
  }
  return false;
}

}  // namespace farandole::collective
