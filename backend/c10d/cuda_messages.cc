#include "backend/c10d/cuda_messages.h"

namespace farandole::backend {
namespace {

constexpr char kAddress = 'A';
constexpr char kError = 'E';

// UCX tells only that a connection broke. Who died or left is said by the group's own transports and its control plane,
// a little later.
class WordOfTheGroup final : public collective::GroupWatch {
 public:
  explicit WordOfTheGroup(std::shared_ptr<ControlWatch> watch) : watch_(std::move(watch)) {}

  void abort(const std::string& reason) override {
    if (watch_ != nullptr) watch_->abort(reason);
  }
  void reportDeath(int rank, const std::string& reason) override {
    if (watch_ != nullptr) watch_->reportDeath(rank, reason);
  }
  void ask() override {
    if (watch_ != nullptr) watch_->ask();
  }
  bool hasAnswers() override { return watch_ == nullptr || watch_->hasAnswers(); }
  void awaitAnswers() override {
    if (watch_ != nullptr) watch_->awaitAnswers();
  }
  std::string answers() override { return watch_ != nullptr ? watch_->answers() : ""; }
  std::vector<int> left() override { return watch_ != nullptr ? watch_->left() : std::vector<int>{}; }
  std::vector<int> departed() override { return watch_ != nullptr ? watch_->departed() : std::vector<int>{}; }

 private:
  const std::shared_ptr<ControlWatch> watch_;
};

// What the communicator keeps alive: the number of the group, and what its connections belong to.
struct Kept {
  std::shared_ptr<CudaTransport> transport;
  std::shared_ptr<void> group;
};

}  // namespace

Result<std::shared_ptr<CudaMessages>> CudaMessages::meet(MeetingPlace& place, Setup setup) {
  std::shared_ptr<CudaMessages> made(new CudaMessages);
  made->rank_ = setup.rank;
  auto transport = CudaTransport::acquire();
  std::string mine;
  if (transport) {
    made->transport_ = std::move(transport).value();
    transport::ProgressEngine::Access access(made->transport_->connections().engine());
    access.transport().openGroup(setup.members[setup.rank].group);
    mine = kAddress + access.transport().address();
  } else {
    mine = kError + std::string(transport.status().message());
  }
  auto told = place.exchange("cuda", mine);
  if (!told) return told.status();
  for (std::size_t rank = 0; rank < told->size(); ++rank) {
    const std::string& entry = (*told)[rank];
    if (entry.empty())
      return Status::internal(setup.communicator->nameOf(static_cast<int>(rank)) + " published no address for CUDA");
    collective::Member& member = setup.members[rank];
    made->errors_.push_back(entry[0] == kAddress ? Status::ok() : Status::unavailable(entry.substr(1)));
    member.address = entry.substr(1);
    member.hostIdentity.clear();  // no memory is shared for it
  }
  if (made->transport_ == nullptr) return made;
  auto kept = std::make_shared<Kept>(Kept{made->transport_, std::move(setup.keepAlive)});
  made->communicator_ = std::make_shared<Communicator>(made->transport_->connections(), std::move(kept), setup.rank,
                                                       std::move(setup.members));
  made->communicator_->setWatch(std::make_shared<WordOfTheGroup>(std::move(setup.watch)));
  setup.communicator->setFollower(made->communicator_);
  return made;
}

Status CudaMessages::canReach(int peer) const {
  const std::string why = "FARANDOLE_CUDA_MESSAGES is 'ucx', but ";
  if (!errors_[rank_]) return errors_[rank_].wrap(why + "this rank cannot send them so");
  if (peer == collective::kAnySource || errors_[peer]) return Status::ok();
  return errors_[peer].wrap(why + communicator_->describe(peer) + " cannot take them so");
}

void CudaMessages::launch(const c10::intrusive_ptr<GatedMessagesWork>& work, const std::shared_ptr<StreamMark>& mark) {
  work->launch();
  transport_->openAfter(mark, work);
}

}  // namespace farandole::backend
