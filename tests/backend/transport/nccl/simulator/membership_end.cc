// The calls of Membership that concern a communicator that is there already.
#include <algorithm>

#include "tests/backend/transport/nccl/simulator/membership.h"
#include "tests/backend/transport/nccl/simulator/thread_state.h"

namespace farandole::testing {

using State = Communicator::State;

ncclResult_t Membership::commGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  const std::lock_guard lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclCommGetAsyncError", communicator, true);
  if (result == ncclSuccess) *error = communicators_.asyncError(*communicator);
  return result;
}

ncclResult_t Membership::drain(Lock& lock, Communicator& communicator) {
  return communicators_.await(
      lock, communicator, [&] { return communicator.pending.empty(); }, [] { return std::nullopt; });
}

ncclResult_t Membership::commFinalize(ncclComm_t handle) {
  Lock lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclCommFinalize", communicator);
  if (result != ncclSuccess) return result;
  const Use use(communicators_, lock, *communicator, "ncclCommFinalize");
  if (communicator->state != State::kLive) {
    core_.violation("ncclCommFinalize", "the communicator was revoked, finalized or freed before");
    return ncclInvalidUsage;
  }
  communicator->state = State::kFinalized;
  const ncclResult_t drained = drain(lock, *communicator);
  awaitGraphs(lock, *communicator);
  return drained;
}

void Membership::awaitGraphs(Lock& lock, const Communicator& communicator) {
  core_.hosts.wait(lock, [&] { return core_.ended || !graphsStay || communicator.captured == 0; });
}

ncclResult_t Membership::commDestroy(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  Lock lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclCommDestroy", communicator);
  if (result != ncclSuccess) return result;
  const Use use(communicators_, lock, *communicator, "ncclCommDestroy");
  if (communicator->freed()) return ncclInternalError;
  if (communicator->state != State::kRevoked) {
    const ncclResult_t drained = drain(lock, *communicator);
    if (drained != ncclSuccess) return drained;
  }
  awaitGraphs(lock, *communicator);
  communicator->state = State::kDestroyed;
  resources_.drop(*communicator);
  core_.changed();
  return ncclSuccess;
}

ncclResult_t Membership::commAbort(ncclComm_t handle) {
  if (handle == nullptr) return ncclSuccess;
  Lock lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclCommAbort", communicator, true);
  if (result != ncclSuccess) return result;
  if (communicator->clique != nullptr) communicator->clique->endKernels(communicator->rank);
  communicator->state = State::kRevoked;  // who is in a call comes out
  core_.changed();
  // It frees memory, for which CUDA waits until every kernel on the device has ended.
  const int device = communicator->device;
  core_.hosts.wait(lock, [&] { return core_.ended || !core_.alive(device) || communicators_.isQuiet(device); });
  awaitGraphs(lock, *communicator);
  communicator->state = State::kAborted;
  resources_.drop(*communicator);
  core_.changed();
  return ncclSuccess;
}

ncclResult_t Membership::commRevoke(ncclComm_t handle, int flags) {
  const std::lock_guard lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclCommRevoke", communicator);
  if (result != ncclSuccess) return result;
  if (flags != 0) return ncclInvalidArgument;
  if (communicator->state == State::kFinalized || communicator->clique == nullptr) return ncclInvalidUsage;
  communicator->state = State::kRevoked;
  communicator->clique->endKernels(communicator->rank);
  core_.changed();
  return ncclSuccess;
}

ncclResult_t Membership::commWindowRegister(ncclComm_t handle, void* buffer, std::size_t size, ncclWindow_t* window,
                                            int flags) {
  Lock lock(core_.mutex);
  if (const auto result = refuse(nullptr, "ncclCommWindowRegister"); result != ncclSuccess) return result;
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclCommWindowRegister", communicator);
  if (result != ncclSuccess) return result;
  const Use use(communicators_, lock, *communicator, "ncclCommWindowRegister");
  communicators_.checkDevice(*communicator, "ncclCommWindowRegister");
  if (buffer == nullptr || size == 0 || window == nullptr) return ncclInvalidArgument;
  if (reinterpret_cast<std::uintptr_t>(buffer) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) return ncclInvalidArgument;
  *window = nullptr;
  const auto meeting =
      meetingOf(*communicator, "ncclCommWindowRegister", static_cast<std::size_t>(communicator->clique->size()));
  const ncclResult_t met = meet(lock, *meeting, communicator->rank, {communicator, nullptr},
                                std::to_string(size) + " " + std::to_string(flags), *communicator);
  if (met != ncclSuccess) return met;
  *window = static_cast<ncclWindow_t>(resources_.addRegistration(*communicator, buffer, size, true));
  return ncclSuccess;
}

ncclResult_t Membership::commWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
  Lock lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclCommWindowDeregister", communicator);
  if (result != ncclSuccess) return result;
  const Use use(communicators_, lock, *communicator, "ncclCommWindowDeregister");
  return resources_.removeRegistration(handle, window, true, "ncclCommWindowDeregister");
}

}  // namespace farandole::testing
