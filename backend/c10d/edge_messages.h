#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "backend/collective/communicator.h"
#include "backend/transport/nccl/edge_talk.h"

namespace farandole::backend {

// What ranks tell each other of their edges between devices, as messages between their CPUs. They come seldom; one that
// is to be heard keeps a receive in flight for each peer. Any thread.
class EdgeMessages final : public transport::EdgeTalk, public std::enable_shared_from_this<EdgeMessages> {
 public:
  explicit EdgeMessages(std::shared_ptr<collective::Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  void listen(int device, Listener listener) override;
  void open(int peer) override;
  void tell(int peer, std::span<const transport::EdgeWord> words) override;
  Status describe(int peer, bool isSend, const transport::EdgeOrder::Difference& difference) const override;

 private:
  class BlockOperation;
  class Telling;
  class Hearing;
  using Words = std::vector<transport::EdgeWord>;

  void hear(int peer, Words words);

  const std::shared_ptr<collective::Communicator> communicator_;
  std::mutex mutex_;  // taken with the transport held
  std::set<int> opened_;
  std::map<int, std::shared_ptr<Listener>> listeners_;       // by device
  std::map<int, std::vector<std::pair<int, Words>>> early_;  // by device: from whom; it has no listener yet
};

}  // namespace farandole::backend
