#pragma once

#include <array>
#include <deque>
#include <memory>

#include "backend/transport/nccl/device_lane.h"
#include "backend/transport/nccl/device_stream.h"
#include "backend/transport/nccl/edge.h"
#include "backend/transport/nccl/edge_talk.h"

namespace farandole::transport {

// The messages of a rank to itself, as a batch around a ring of one has them: copies on the device, each made when both
// its send and its receive have been posted; with each tag the first of one is for the first of the other. Guarded by
// its owner.
class OwnMessages {
 public:
  // `talk`: for the text of an error.
  OwnMessages(const CudaApi& cuda, std::shared_ptr<EventPool> events, int device, const EdgeTalk& talk)
      : cuda_(cuda), events_(std::move(events)), device_(device), talk_(talk) {}

  // A dtype or size that is not the counterpart's ends both, with kMismatch.
  Status post(EdgeMessage message);
  // Sends and receives are each in order.
  std::array<std::shared_ptr<DeviceLane>, 2> lanes() const { return {sends_, receives_}; }
  // What waits for its counterpart; nothing does from then on.
  std::deque<EdgeMessage> takeWaiting();

 private:
  Status copy(const EdgeMessage& send, const EdgeMessage& receive);

  const CudaApi& cuda_;
  const std::shared_ptr<EventPool> events_;
  const int device_;
  const EdgeTalk& talk_;
  const std::shared_ptr<DeviceLane> sends_ = std::make_shared<DeviceLane>();
  const std::shared_ptr<DeviceLane> receives_ = std::make_shared<DeviceLane>();
  std::unique_ptr<DeviceStream> stream_;  // made with the first copy
  std::deque<EdgeMessage> waiting_;       // of each tag all sends or all receives
};

}  // namespace farandole::transport
