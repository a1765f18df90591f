#include "backend/transport/nccl/abortable_communicators.h"

#include <thread>
#include <utility>

namespace farandole::transport {

void Aborts::begin(std::shared_ptr<NcclCommunicator> communicator) {
  std::packaged_task<void()> abort([communicator = std::move(communicator)]() mutable {
    communicator->abort();
    communicator.reset();  // nothing is left to this thread once it has told
  });
  ends_.push_back(abort.get_future());
  std::thread(std::move(abort)).detach();
}

void Aborts::wait(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (const auto& end : ends_) (void)end.wait_until(deadline);
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
  for (const auto& communicator : all()) aborts.begin(communicator);
}

Status AbortableCommunicators::closeAll() {
  Status first;
  for (const auto& communicator : all()) {
    if (const Status status = communicator->close(); first) first = status;
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
