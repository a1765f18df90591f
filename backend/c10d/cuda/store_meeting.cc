#include "backend/c10d/cuda/store_meeting.h"

#include <cstring>

#include "backend/c10d/store_gathering.h"

namespace farandole::backend {

using transport::DeviceClock;

Result<ncclUniqueId> StoreMeeting::meet(const std::string& name, int rank, int size, DeviceClock::time_point deadline) {
  try {
    return meetInStore("farandole/nccl/" + name, rank, size, deadline);
  } catch (const std::exception& error) {
    return Status::internal(std::string("the store: ") + error.what());
  }
}

Result<bool> StoreMeeting::agree(const std::string& name, int size, bool mine, DeviceClock::time_point deadline) {
  try {
    const auto isSame =
        StoreGathering(*store_, "farandole/nccl/" + name + "/vote", size).agree(mine ? "yes" : "no", deadline, health_);
    return isSame ? Result<bool>(*isSame && mine) : isSame;
  } catch (const std::exception& error) {
    return Status::internal(std::string("the store: ") + error.what());
  }
}

Result<ncclUniqueId> StoreMeeting::meetInStore(const std::string& key, int rank, int size,
                                               DeviceClock::time_point deadline) {
  if (rank == 0) {
    ncclUniqueId id;
    FARANDOLE_RETURN_IF_ERROR(nccl_.check(nccl_.getUniqueId(&id), "ncclGetUniqueId"));
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(&id);
    store_->set(key + "/id", std::vector<std::uint8_t>(bytes, bytes + sizeof id));
  }
  FARANDOLE_RETURN_IF_ERROR(StoreGathering(*store_, key, size).await(deadline, health_));
  const std::vector<std::uint8_t> bytes = store_->get(key + "/id");
  ncclUniqueId id;
  if (bytes.size() != sizeof id)
    return Status::internal("the store has an id of " + std::to_string(bytes.size()) + " bytes");
  std::memcpy(&id, bytes.data(), sizeof id);
  return id;
}

}  // namespace farandole::backend
