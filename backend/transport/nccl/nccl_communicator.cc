#include "backend/transport/nccl/nccl_communicator.h"

#include <chrono>
#include <thread>
#include <utility>

namespace farandole::transport {
namespace {

// How long a call is waited for, by who aborts its communicator.
constexpr std::chrono::milliseconds kCallLimit{20};
constexpr std::chrono::milliseconds kRevokedCallLimit{2000};
constexpr std::chrono::milliseconds kCallLook{1};

// NCCL keeps the pointer to the name.
ncclConfig_t configOf(const std::string& name, int maxCtas) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  config.commName = name.c_str();
  if (maxCtas > 0) config.maxCTAs = maxCtas;
  return config;
}

Status finalize(const NcclApi& nccl, const std::string& name, ncclComm_t handle) {
  return nccl.check(nccl.commFinalize(handle), "ncclCommFinalize of " + name);
}

// The peers have what was sent once it returns: this, and not the call before, waits for NCCL's thread that sends
// (2.28).
Status destroy(const NcclApi& nccl, const std::string& name, ncclComm_t handle) {
  return nccl.check(nccl.commDestroy(handle), "ncclCommDestroy of " + name);
}

}  // namespace

NcclCommunicator::NcclCommunicator(const DeviceRuntime& runtime, Name name, int device, ncclComm_t handle)
    : runtime_(runtime), name_(std::move(name)), device_(device), handle_(handle) {}

Result<std::shared_ptr<NcclCommunicator>> NcclCommunicator::connect(const DeviceRuntime& runtime,
                                                                    const CommunicatorSpec& spec) {
  const DeviceScope scope(runtime.cuda, spec.device);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  auto name = std::make_shared<const std::string>(spec.name);
  ncclConfig_t config = configOf(*name, spec.maxCtas);
  ncclComm_t handle = nullptr;
  FARANDOLE_RETURN_IF_ERROR(
      runtime.nccl.check(runtime.nccl.commInitRankConfig(&handle, spec.size, spec.id, spec.rank, &config),
                         "ncclCommInitRankConfig of " + spec.name));
  return std::shared_ptr<NcclCommunicator>(new NcclCommunicator(runtime, std::move(name), spec.device, handle));
}

Result<std::shared_ptr<NcclCommunicator>> NcclCommunicator::shrink(const DeviceRuntime& runtime,
                                                                   const std::string& text,
                                                                   const NcclCommunicator& from, const Turn& turn,
                                                                   std::vector<int> excluded) {
  const DeviceScope scope(runtime.cuda, from.device_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  auto name = std::make_shared<const std::string>(text);
  ncclConfig_t config = configOf(*name, 0);
  ncclComm_t handle = nullptr;
  FARANDOLE_RETURN_IF_ERROR(runtime.nccl.check(
      runtime.nccl.commShrink(turn.handle(), excluded.data(), static_cast<int>(excluded.size()), &handle, &config, 0),
      "ncclCommShrink of " + from.name() + " to " + text));
  return std::shared_ptr<NcclCommunicator>(new NcclCommunicator(runtime, std::move(name), from.device_, handle));
}

NcclCommunicator::~NcclCommunicator() { abort(); }

NcclCommunicator::Turn::Turn(NcclCommunicator& communicator)
    : lock_(communicator.turn_), handle_(communicator.isAborted_ ? nullptr : communicator.handle_.load()) {}

NcclCommunicator::Turn::Turn(NcclCommunicator& communicator, std::try_to_lock_t tryOnly)
    : lock_(communicator.turn_, tryOnly),
      handle_(!lock_ || communicator.isAborted_ ? nullptr : communicator.handle_.load()) {}

Status NcclCommunicator::ended() const { return Status::aborted(*name_ + " was closed or aborted"); }

Status NcclCommunicator::asyncError() {
  std::lock_guard lock(ending_);
  if (handle_ == nullptr || isAborted_) return Status::ok();
  ncclResult_t found = ncclSuccess;
  FARANDOLE_RETURN_IF_ERROR(
      runtime_.nccl.check(runtime_.nccl.commGetAsyncError(handle_, &found), "ncclCommGetAsyncError of " + *name_));
  if (found == ncclInProgress) return Status::ok();
  return runtime_.nccl.check(found, *name_);
}

Status NcclCommunicator::addMemoryUse(NcclMemoryUse& use) {
  const NcclApi& nccl = runtime_.nccl;
  if (nccl.commMemStats == nullptr) return nccl.lacks("ncclCommMemStats");
  const Turn turn(*this);
  if (turn.handle() == nullptr) return Status::ok();
  // ncclCommMemStat_t, which older headers lack.
  enum Statistic : int { kSuspendable, kIsSuspended, kPersistent, kTotal };
  std::uint64_t values[4] = {};
  for (const int statistic : {kSuspendable, kIsSuspended, kPersistent, kTotal}) {
    FARANDOLE_RETURN_IF_ERROR(
        nccl.check(nccl.commMemStats(turn.handle(), statistic, &values[statistic]), "ncclCommMemStats of " + *name_));
  }
  use.suspendable += values[kSuspendable];
  use.persistent += values[kPersistent];
  use.total += values[kTotal];
  use.isSuspended = use.isSuspended || values[kIsSuspended] != 0;
  return Status::ok();
}

void NcclCommunicator::interrupt() {
  isAborted_ = true;
  if (runtime_.nccl.commRevoke == nullptr || isClosing_) return;
  const std::unique_lock turn(turn_, std::try_to_lock);
  std::lock_guard ending(ending_);
  if (!turn && handle_ != nullptr) (void)runtime_.nccl.commRevoke(handle_, 0);
}

void NcclCommunicator::abort() {
  const DeviceScope scope(runtime_.cuda, device_);
  interrupt();
  std::unique_lock turn(turn_, std::defer_lock);
  // Who is stuck in a call comes out of it once that is revoked. Without that, only the end of the communicator helps,
  // though the call still uses it.
  const auto deadline =
      std::chrono::steady_clock::now() + (runtime_.nccl.commRevoke != nullptr ? kRevokedCallLimit : kCallLimit);
  while (!turn.try_lock() && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(kCallLook);
  // One that is being closed is left to NCCL, which would be freed under it.
  if (!turn && isClosing_) return;
  std::lock_guard ending(ending_);
  const ncclComm_t handle = handle_.exchange(nullptr);
  if (handle == nullptr) return;
  if (!isCaptured_) {
    (void)runtime_.nccl.commAbort(handle);
    return;
  }
  // What runs ends at once, the rest when the graphs are gone, and that may be at the end of the process.
  std::thread([&runtime = runtime_, device = device_, handle, name = name_] {
    const DeviceScope scope(runtime.cuda, device);
    (void)runtime.nccl.commAbort(handle);
  }).detach();
}

Status NcclCommunicator::close() {
  const DeviceScope scope(runtime_.cuda, device_);
  std::lock_guard turn(turn_);
  isClosing_ = true;
  const ncclComm_t handle = handle_;
  if (handle == nullptr || isAborted_) {
    isClosing_ = false;
    return ended();
  }
  FARANDOLE_RETURN_IF_ERROR(finalize(runtime_.nccl, *name_, handle));
  {
    std::lock_guard ending(ending_);
    handle_ = nullptr;
  }
  return destroy(runtime_.nccl, *name_, handle);
}

std::future<Status> NcclCommunicator::closeAside() {
  std::lock_guard turn(turn_);
  std::lock_guard ending(ending_);
  const ncclComm_t handle = isAborted_ ? nullptr : handle_.exchange(nullptr);
  std::packaged_task<Status()> closing(
      [&runtime = runtime_, device = device_, handle, name = name_, over = ended()]() -> Status {
        if (handle == nullptr) return over;
        const DeviceScope scope(runtime.cuda, device);
        FARANDOLE_RETURN_IF_ERROR(finalize(runtime.nccl, *name, handle));
        return destroy(runtime.nccl, *name, handle);
      });
  auto closed = closing.get_future();
  std::thread(std::move(closing)).detach();
  return closed;
}

NcclGroup::NcclGroup(const NcclApi& nccl) : nccl_(nccl) { begin(); }

void NcclGroup::begin() {
  status_ = nccl_.check(nccl_.groupStart(), "ncclGroupStart");
  isOpen_ = status_.isOk();
}

NcclGroup::~NcclGroup() { (void)end(); }

void NcclGroup::add(ncclResult_t result, const char* what) {
  if (status_ && result != ncclSuccess) status_ = nccl_.check(result, what);
}

void NcclGroup::cut() {
  if (end()) begin();
}

Status NcclGroup::end() {
  if (!std::exchange(isOpen_, false)) return status_;
  // Also after a failed call: the thread would stay in the group.
  const ncclResult_t result = nccl_.groupEnd();
  if (status_) status_ = nccl_.check(result, "ncclGroupEnd");
  return status_;
}

}  // namespace farandole::transport
