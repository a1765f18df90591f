#include "tests/backend/transport/nccl/simulator/resources.h"

#include <algorithm>
#include <cstdlib>

namespace farandole::testing {
namespace {

constexpr std::size_t kAlignment = 4096;
// Plausible sizes of what NCCL allocates.
constexpr std::uint64_t kBytesOfItsOwn = 1 << 20;
constexpr std::uint64_t kBytesPerConnection = 2 << 20;

}  // namespace

Resources::~Resources() {
  for (const auto& [memory, size] : allocations_) std::free(memory);
}

ncclResult_t Resources::redOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                             ncclScalarResidence_t residence, ncclComm_t handle) {
  Lock lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclRedOpCreatePreMulSum", communicator);
  if (result != ncclSuccess) return result;
  const Use use(communicators_, lock, *communicator, "ncclRedOpCreatePreMulSum");
  const std::size_t size = elementSize(dtype);
  if (scalar == nullptr || size == 0) return ncclInvalidArgument;
  Operator created;
  if (residence == ncclScalarHostImmediate) {
    const auto* const bytes = static_cast<const std::byte*>(scalar);
    created.scalar = std::make_shared<const Bytes>(bytes, bytes + size);
  } else {
    created.deviceScalar = scalar;
  }
  const int id = static_cast<int>(ncclNumOps) + static_cast<int>(operators_.size());
  operators_[id] = {communicator, dtype, created, true};
  *op = static_cast<ncclRedOp_t>(id);
  return ncclSuccess;
}

ncclResult_t Resources::redOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  Lock lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclRedOpDestroy", communicator);
  if (result != ncclSuccess) return result;
  const Use use(communicators_, lock, *communicator, "ncclRedOpDestroy");
  const auto found = operators_.find(static_cast<int>(op));
  if (found == operators_.end() || !found->second.live || found->second.communicator != communicator) {
    core_.violation("ncclRedOpDestroy", "no such operation of this communicator, or destroyed before");
    return ncclInvalidArgument;
  }
  found->second.live = false;
  return ncclSuccess;
}

ncclResult_t Resources::operatorOf(ncclRedOp_t op, ncclDataType_t dtype, const Communicator& communicator,
                                   const char* function, Operator& wanted) {
  if (op >= ncclSum && op < ncclNumOps) {
    wanted.kind = op;
    return ncclSuccess;
  }
  const auto found = operators_.find(static_cast<int>(op));
  if (found == operators_.end() || !found->second.live || found->second.communicator != &communicator) {
    core_.violation(function, "no such reduction operation of this communicator, or destroyed before");
    return ncclInvalidArgument;
  }
  if (found->second.dtype != dtype) return ncclInvalidArgument;
  wanted = found->second.op;
  return ncclSuccess;
}

ncclResult_t Resources::commRegister(ncclComm_t handle, void* buffer, std::size_t size, void** registration) {
  Lock lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclCommRegister", communicator);
  if (result != ncclSuccess) return result;
  const Use use(communicators_, lock, *communicator, "ncclCommRegister");
  communicators_.checkDevice(*communicator, "ncclCommRegister");
  if (buffer == nullptr || size == 0) return ncclInvalidArgument;
  *registration = addRegistration(*communicator, buffer, size, false);
  return ncclSuccess;
}

ncclResult_t Resources::commDeregister(ncclComm_t handle, void* registration) {
  Lock lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclCommDeregister", communicator);
  if (result != ncclSuccess) return result;
  const Use use(communicators_, lock, *communicator, "ncclCommDeregister");
  return removeRegistration(handle, registration, false, "ncclCommDeregister");
}

void* Resources::addRegistration(Communicator& communicator, void* buffer, std::size_t size, bool window) {
  auto created = std::make_unique<Registration>();
  *created = {&communicator, static_cast<const std::byte*>(buffer), size, window, true};
  void* const handle = created.get();
  registrations_[handle] = std::move(created);
  return handle;
}

ncclResult_t Resources::removeRegistration(ncclComm_t handle, void* registration, bool window, const char* function) {
  const auto found = registrations_.find(registration);
  if (found == registrations_.end() || !found->second->live || found->second->window != window ||
      found->second->communicator != communicators_.lookUp(handle)) {
    core_.violation(function, "no such registration of this communicator, or taken back before");
    return ncclInvalidUsage;
  }
  found->second->live = false;
  return ncclSuccess;
}

ncclResult_t Resources::memAlloc(void** memory, std::size_t size) {
  const std::lock_guard lock(core_.mutex);
  *memory = std::aligned_alloc(kAlignment, std::max<std::size_t>((size + kAlignment - 1) / kAlignment, 1) * kAlignment);
  if (*memory == nullptr) return ncclUnhandledCudaError;
  allocations_[*memory] = size;
  return ncclSuccess;
}

ncclResult_t Resources::memFree(void* memory) {
  const std::lock_guard lock(core_.mutex);
  if (memory == nullptr) return ncclSuccess;
  const auto found = allocations_.find(memory);
  if (found == allocations_.end()) {
    core_.violation("ncclMemFree", "not allocated by ncclMemAlloc, or freed before");
    return ncclInvalidUsage;
  }
  const auto* const begin = static_cast<const std::byte*>(memory);
  for (const auto& [handle, registration] : registrations_) {
    const bool apart =
        registration->begin + registration->size <= begin || begin + found->second <= registration->begin;
    if (registration->live && !apart) core_.violation("ncclMemFree", "the memory is still registered");
  }
  allocations_.erase(found);
  std::free(memory);
  return ncclSuccess;
}

ncclResult_t Resources::commMemStats(ncclComm_t handle, int statistic, std::uint64_t* value) {
  Lock lock(core_.mutex);
  Communicator* communicator = nullptr;
  const ncclResult_t result = communicators_.find(handle, "ncclCommMemStats", communicator);
  if (result != ncclSuccess) return result;
  const Use use(communicators_, lock, *communicator, "ncclCommMemStats");
  const std::uint64_t connections = communicator->clique->countConnections(communicator->rank) * kBytesPerConnection;
  switch (statistic) {  // ncclCommMemStat_t, which older headers lack
    case 0: *value = connections; break;
    case 1: *value = 0; break;
    case 2: *value = kBytesOfItsOwn; break;
    case 3: *value = kBytesOfItsOwn + connections; break;
    default: return ncclInvalidArgument;
  }
  return ncclSuccess;
}

void Resources::drop(const Communicator& communicator) {
  for (auto& [id, created] : operators_) {
    if (created.communicator == &communicator) created.live = false;
  }
  for (auto& [handle, registration] : registrations_) {
    if (registration->communicator == &communicator) registration->live = false;
  }
}

int Resources::countOperators() const {
  return static_cast<int>(
      std::count_if(operators_.begin(), operators_.end(), [](const auto& entry) { return entry.second.live; }));
}

int Resources::countRegistrations() const {
  return static_cast<int>(std::count_if(registrations_.begin(), registrations_.end(),
                                        [](const auto& entry) { return entry.second->live; }));
}

}  // namespace farandole::testing
