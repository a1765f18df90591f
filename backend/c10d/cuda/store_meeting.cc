#include "backend/c10d/cuda/store_meeting.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace farandole::backend {

using transport::DeviceClock;

Result<ncclUniqueId> StoreMeeting::meet(const std::string& name, int rank, int size, DeviceClock::time_point deadline) {
  try {
    return meetInStore("farandole/nccl/" + name, rank, size, deadline);
  } catch (const std::exception& error) {
    return Status::internal(std::string("the store: ") + error.what());
  }
}

Result<ncclUniqueId> StoreMeeting::meetInStore(const std::string& key, int rank, int size,
                                               DeviceClock::time_point deadline) {
  const std::string all = key + "/all";
  if (rank == 0) {
    ncclUniqueId id;
    FARANDOLE_RETURN_IF_ERROR(nccl_.check(nccl_.getUniqueId(&id), "ncclGetUniqueId"));
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(&id);
    store_->set(key + "/id", std::vector<std::uint8_t>(bytes, bytes + sizeof id));
  }
  if (store_->add(key + "/here", 1) == size) store_->set(all, std::vector<std::uint8_t>{1});
  // Not one long wait: who waits in the store cannot be told that the group is over.
  for (std::chrono::milliseconds pause{1}; !store_->check({all});
       pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
    FARANDOLE_RETURN_IF_ERROR(health_());
    if (DeviceClock::now() >= deadline) {
      return Status::timeout(std::to_string(store_->add(key + "/here", 0)) + " of " + std::to_string(size) +
                             " ranks have come in time");
    }
    std::this_thread::sleep_for(pause);
  }
  const std::vector<std::uint8_t> bytes = store_->get(key + "/id");
  ncclUniqueId id;
  if (bytes.size() != sizeof id)
    return Status::internal("the store has an id of " + std::to_string(bytes.size()) + " bytes");
  std::memcpy(&id, bytes.data(), sizeof id);
  return id;
}

}  // namespace farandole::backend
