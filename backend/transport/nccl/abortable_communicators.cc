#include "backend/transport/nccl/abortable_communicators.h"

namespace farandole::transport {

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

void AbortableCommunicators::abortAll() {
  {
    std::lock_guard lock(mutex_);
    isOver_ = true;
  }
  for (const auto& communicator : all()) communicator->interrupt();
  for (const auto& communicator : all()) communicator->abort();
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
