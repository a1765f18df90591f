#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/c10d/control_watch.h"
#include "backend/c10d/cuda_transport.h"
#include "backend/c10d/rendezvous.h"

namespace farandole::backend {

// One group's messages of CUDA tensors where UCX carries them (FARANDOLE_CUDA_MESSAGES): a communicator of their own,
// that ends with the group's. Where some rank's UCX has no CUDA the group is made all the same; it is told to who sends
// there. Any thread.
class CudaMessages {
 public:
  struct Setup {
    std::shared_ptr<Communicator> communicator;  // the group's
    std::vector<collective::Member> members;     // as they were met
    std::shared_ptr<ControlWatch> watch;         // null where all ranks are on this host
    std::shared_ptr<void> keepAlive;             // held as long as anything is in flight
    int rank;
  };
  // Meets the other ranks, of which all must call it.
  static Result<std::shared_ptr<CudaMessages>> meet(MeetingPlace& place, Setup setup);

  // Ok, or why no message can go to this rank, or come from it; any rank: from somewhere.
  Status canReach(int peer) const;
  // What is on the device's current stream by now. After canReach(): ok.
  Result<std::shared_ptr<StreamMark>> mark(at::Device device) { return transport_->mark(device); }
  // Launches it; what it sends and receives is posted once the stream has come to the mark, and for each peer and
  // direction in the order of these calls.
  void launch(const c10::intrusive_ptr<GatedMessagesWork>& work, const std::shared_ptr<StreamMark>& mark);

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

 private:
  CudaMessages() = default;

  int rank_ = 0;
  std::vector<Status> errors_;  // by rank
  std::shared_ptr<CudaTransport> transport_;
  std::shared_ptr<Communicator> communicator_;
};

}  // namespace farandole::backend
