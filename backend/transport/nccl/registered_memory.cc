#include "backend/transport/nccl/registered_memory.h"

#include <algorithm>

namespace farandole::transport {
namespace {

// NCCL_WIN_COLL_SYMMETRIC, which the oldest headers lack.
constexpr int kSymmetricWindow = 1;

}  // namespace

Result<RegisteredMemory::Registration> RegisteredMemory::add(ncclComm_t communicator, const MemorySegment& segment,
                                                             bool isSymmetric) {
  Registration made{segment, isSymmetric, nullptr};
  if (isSymmetric) {
    ncclWindow_t window = nullptr;
    FARANDOLE_RETURN_IF_ERROR(
        nccl_.check(nccl_.commWindowRegister(communicator, segment.data, segment.bytes, &window, kSymmetricWindow),
                    "ncclCommWindowRegister"));
    made.handle = window;
  } else {
    FARANDOLE_RETURN_IF_ERROR(
        nccl_.check(nccl_.commRegister(communicator, segment.data, segment.bytes, &made.handle), "ncclCommRegister"));
  }
  return made;
}

Status RegisteredMemory::takeBack(ncclComm_t communicator, std::vector<Registration>& registrations) {
  Status first;
  for (const Registration& one : registrations) {
    if (one.handle == nullptr) continue;
    const Status status =
        one.isSymmetric ? nccl_.check(nccl_.commWindowDeregister(communicator, static_cast<ncclWindow_t>(one.handle)),
                                      "ncclCommWindowDeregister")
                        : nccl_.check(nccl_.commDeregister(communicator, one.handle), "ncclCommDeregister");
    if (first) first = status;
  }
  registrations.clear();
  return first;
}

Status RegisteredMemory::set(ncclComm_t communicator, MemoryPoolId pool, const std::vector<MemorySegment>& segments,
                             bool isSymmetric) {
  if (isSymmetric && (nccl_.commWindowRegister == nullptr || nccl_.commWindowDeregister == nullptr)) {
    return nccl_.lacks("ncclCommWindowRegister");
  }
  std::vector<Registration>& known = pools_[pool];
  const auto isSame = [&](const Registration& one, const MemorySegment& segment) {
    return one.segment.data == segment.data && one.segment.bytes == segment.bytes && one.isSymmetric == isSymmetric;
  };
  const auto gone = std::stable_partition(known.begin(), known.end(), [&](const Registration& one) {
    return std::ranges::any_of(segments, [&](const MemorySegment& segment) { return isSame(one, segment); });
  });
  std::vector<Registration> former(gone, known.end());
  known.erase(gone, known.end());
  FARANDOLE_RETURN_IF_ERROR(takeBack(communicator, former));
  std::vector<Registration> made;
  for (const MemorySegment& segment : segments) {
    if (std::ranges::any_of(known, [&](const Registration& one) { return isSame(one, segment); })) continue;
    auto added = add(communicator, segment, isSymmetric);
    if (!added) {
      (void)takeBack(communicator, made);
      return added.status();
    }
    made.push_back(*added);
  }
  known.insert(known.end(), made.begin(), made.end());
  return Status::ok();
}

Status RegisteredMemory::remove(ncclComm_t communicator, MemoryPoolId pool) {
  const auto found = pools_.find(pool);
  if (found == pools_.end()) {
    return Status::invalidArgument("memory pool (" + std::to_string(pool.first) + ", " + std::to_string(pool.second) +
                                   ") is not registered; expected one that is");
  }
  auto registrations = std::move(found->second);
  pools_.erase(found);
  return takeBack(communicator, registrations);
}

Status RegisteredMemory::removeAll(ncclComm_t communicator) {
  Status first;
  for (auto& [pool, registrations] : pools_) {
    if (const Status status = takeBack(communicator, registrations); first) first = status;
  }
  pools_.clear();
  return first;
}

}  // namespace farandole::transport
