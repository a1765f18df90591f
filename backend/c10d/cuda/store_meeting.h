#pragma once

#include <functional>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/transport/nccl/communicator_meeting.h"
#include "backend/transport/nccl/nccl_api.h"

namespace farandole::backend {

// The ranks of NCCL's communicators meet in the group's store. Any thread.
class StoreMeeting final : public transport::CommunicatorMeeting {
 public:
  // `health`: ok, or why nobody will come any more.
  StoreMeeting(c10::intrusive_ptr<::c10d::Store> store, const transport::NcclApi& nccl, std::function<Status()> health)
      : store_(std::move(store)), nccl_(nccl), health_(std::move(health)) {}

  Result<ncclUniqueId> meet(const std::string& name, int rank, int size,
                            transport::DeviceClock::time_point deadline) override;
  Result<bool> agree(const std::string& name, int size, bool mine,
                     transport::DeviceClock::time_point deadline) override;

 private:
  Result<ncclUniqueId> meetInStore(const std::string& key, int rank, int size,
                                   transport::DeviceClock::time_point deadline);

  const c10::intrusive_ptr<::c10d::Store> store_;
  const transport::NcclApi& nccl_;
  const std::function<Status()> health_;
};

}  // namespace farandole::backend
