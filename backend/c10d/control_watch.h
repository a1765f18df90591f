#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "backend/c10d/call_counts.h"
#include "backend/c10d/process_context.h"
#include "backend/c10d/rendezvous.h"
#include "backend/collective/communicator.h"
#include "backend/collective/group_watch.h"
#include "backend/net/control_plane.h"

namespace farandole::backend {

// A group that spans hosts as a member of the process's control plane: turns its
// word on deaths and aborts into the end of the group here, and leaves in order
// when it is let go of. Held by the group and its communicator. Any thread.
class ControlWatch final : public net::ControlListener, public collective::GroupWatch {
 public:
  static Result<std::shared_ptr<ControlWatch>> join(std::shared_ptr<ProcessContext> context,
                                                    const std::shared_ptr<collective::Communicator>& communicator,
                                                    const Meeting& meeting, std::shared_ptr<const CallCounts> counts);
  ~ControlWatch() override { leave(); }

  // From here on this process may end as it likes.
  void leave();

  void abort(const std::string& reason) override;
  void reportDeath(int rank, const std::string& reason) override;
  void ask() override;
  bool hasAnswers() override;
  void awaitAnswers() override;
  std::string answers() override;
  std::vector<int> left() override { return departures_->left(); }
  std::vector<int> departed() override { return departures_->gone(); }

 private:
  // Of one question after the other; outlives the watch with an answer under way.
  struct Answers {
    std::mutex mutex;
    std::condition_variable arrived;
    bool asked = false;  // and not answered yet
    net::GroupAnswers latest;
  };

  ControlWatch(std::shared_ptr<ProcessContext> context, const std::shared_ptr<collective::Communicator>& communicator,
               std::string group, std::shared_ptr<const CallCounts> counts);
  void peerFailed(int rank, const Status& status) override;
  void aborted(int rank, const Status& status) override;
  std::shared_ptr<net::Departures> departures() override { return departures_; }
  std::string report() override;

  const std::shared_ptr<ProcessContext> context_;
  const std::weak_ptr<collective::Communicator> communicator_;
  const std::string group_;  // its key in the control plane
  const std::shared_ptr<const CallCounts> counts_;
  const std::shared_ptr<Answers> answers_ = std::make_shared<Answers>();
  const std::shared_ptr<net::Departures> departures_ = std::make_shared<net::Departures>();
  std::atomic<bool> joined_{false};
};

}  // namespace farandole::backend
