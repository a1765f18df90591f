#include "backend/transport/nccl/abortable_communicators.h"

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

namespace farandole::transport {
namespace {

using Ends = std::vector<std::future<void>>;

void waitFor(const Ends& ends, std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (const auto& end : ends) (void)end.wait_until(deadline);
}

// Aborts that go on.
struct Open {
  static Open& get() {
    static Open& open = *new Open;  // outlives whoever aborts last
    return open;
  }

  std::mutex mutex;
  Ends ends;
};

}  // namespace

Aborts::~Aborts() {
  const auto hasEnded = [](const auto& end) {
    return end.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  std::erase_if(ends_, hasEnded);
  if (ends_.empty()) return;
  Open& open = Open::get();
  std::lock_guard lock(open.mutex);
  std::erase_if(open.ends, hasEnded);
  std::ranges::move(ends_, std::back_inserter(open.ends));
}

void Aborts::begin(std::shared_ptr<NcclCommunicator> communicator) {
  std::packaged_task<void()> abort([communicator = std::move(communicator)]() mutable {
    communicator->abort();
    communicator.reset();  // nothing is left to this thread once it has told
  });
  ends_.push_back(abort.get_future());
  std::thread(std::move(abort)).detach();
}

void Aborts::wait(std::chrono::milliseconds limit) { waitFor(ends_, limit); }

void Aborts::waitForAll(std::chrono::milliseconds limit) {
  Open& open = Open::get();
  Ends ends;
  {
    std::lock_guard lock(open.mutex);
    ends.swap(open.ends);
  }
  waitFor(ends, limit);
}

bool AbortableCommunicators::add(const std::shared_ptr<NcclCommunicator>& communicator) {
  {
    std::lock_guard lock(mutex_);
    if (!isOver_) {
      communicators_.push_back(communicator);
      return true;
    }
  }
  communicator->abort();
  return false;
}

std::vector<std::shared_ptr<NcclCommunicator>> AbortableCommunicators::all() {
  std::lock_guard lock(mutex_);
  return communicators_;
}

void AbortableCommunicators::abortAll(Aborts& aborts) {
  {
    std::lock_guard lock(mutex_);
    isOver_ = true;
  }
  for (const auto& communicator : all()) communicator->interrupt();
  for (const auto& communicator : all()) {
    if (!communicator->isFreed()) aborts.begin(communicator);
  }
}

Status AbortableCommunicators::closeAll(std::vector<std::future<Status>>& captured) {
  Status first;
  for (const auto& communicator : all()) {
    if (communicator->isCaptured()) {
      captured.push_back(communicator->closeAside());
    } else if (const Status status = communicator->close(); first) {
      first = status;
    }
  }
  return first;
}

Status AbortableCommunicators::addMemoryUse(NcclMemoryUse& use) {
  for (const auto& communicator : all()) FARANDOLE_RETURN_IF_ERROR(communicator->addMemoryUse(use));
  return Status::ok();
}

Status AbortableCommunicators::asyncError() {
  for (const auto& communicator : all()) FARANDOLE_RETURN_IF_ERROR(communicator->asyncError());
  return Status::ok();
}

}  // namespace farandole::transport
