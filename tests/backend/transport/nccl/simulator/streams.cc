#include "tests/backend/transport/nccl/simulator/streams.h"

#include <algorithm>

#include "tests/backend/transport/nccl/simulator/capture.h"

namespace farandole::testing {

bool FunctionWork::step(Lock& lock) {
  lock.unlock();
  function_();
  lock.lock();
  return true;
}

std::shared_ptr<Work> FunctionWork::again(Replay& replay) const { return std::make_shared<FunctionWork>(function_); }

bool RecordWork::step(Lock& lock) {
  moment_->passed = true;
  return true;
}

std::shared_ptr<Work> RecordWork::again(Replay& replay) const {
  return std::make_shared<RecordWork>(replay.momentFor(moment_));
}

std::shared_ptr<Work> WaitWork::again(Replay& replay) const {
  return std::make_shared<WaitWork>(replay.momentFor(moment_));
}

std::shared_ptr<Work> HoldWork::again(Replay& replay) const {
  auto work = std::make_shared<HoldWork>();
  work->release();  // nobody could release it
  return work;
}

void Streams::runUntilEnd() {
  Lock lock(core_.mutex);
  while (!core_.ended) {
    const std::shared_ptr<Stream> stream = choose();
    if (stream == nullptr) {
      core_.executor.wait(lock);
      continue;
    }
    const std::shared_ptr<Work> work = stream->queue.front();
    if (work->step(lock)) stream->queue.pop_front();
    if (stream->queue.empty() && (stream->destroyed || stream->kind == Stream::Kind::kReplay)) {
      running_.erase(std::find(running_.begin(), running_.end(), stream));
    }
    core_.hosts.notify_all();
  }
}

std::shared_ptr<Stream> Streams::choose() {
  candidates_.clear();
  for (std::size_t i = 0; i < running_.size(); ++i) {
    const Stream& stream = *running_[i];
    if (!stream.queue.empty() && core_.alive(stream.device) && stream.queue.front()->ready()) candidates_.push_back(i);
  }
  if (candidates_.empty()) return nullptr;
  std::uniform_int_distribution<std::size_t> any(0, candidates_.size() - 1);
  return running_[candidates_[any(core_.random)]];
}

std::shared_ptr<Stream> Streams::create(int device, Stream::Kind kind) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->kind = kind;
  running_.push_back(stream);
  if (kind != Stream::Kind::kReplay) known_[stream->handle()] = stream;
  return stream;
}

Stream* Streams::find(cudaStream_t handle, int device, const char* function) {
  if (handle == nullptr) {
    std::shared_ptr<Stream>& stream = legacy_[device];
    if (stream == nullptr) stream = create(device, Stream::Kind::kUsers);
    return stream.get();
  }
  const auto found = known_.find(handle);
  if (found == known_.end()) {
    core_.violation(function, "no such stream");
    return nullptr;
  }
  if (found->second->destroyed) {
    core_.violation(function, "the stream was destroyed");
    return nullptr;
  }
  return found->second.get();
}

void Streams::put(Stream& stream, std::shared_ptr<Work> work) {
  if (stream.capture != nullptr) {
    stream.capture->items.push_back({&stream, std::move(work)});
    return;
  }
  work->launched();
  stream.queue.push_back(std::move(work));
  core_.executor.notify_one();
}

void Streams::leaveCapture(const std::shared_ptr<Capture>& capture) {
  for (const auto& [handle, stream] : known_) {
    if (stream->capture == capture) stream->capture = nullptr;
  }
}

std::vector<std::shared_ptr<Capture>> Streams::captures() const {
  std::vector<std::shared_ptr<Capture>> all;
  for (const auto& [handle, stream] : known_) {
    if (stream->capture != nullptr && stream->graph == stream->capture) all.push_back(stream->capture);
  }
  return all;
}

int Streams::countCreated() const {
  return static_cast<int>(std::count_if(known_.begin(), known_.end(), [](const auto& entry) {
    return entry.second->kind == Stream::Kind::kCreated && !entry.second->destroyed;
  }));
}

}  // namespace farandole::testing
