#include "backend/c10d/process_group.h"

#include "backend/c10d/errors.h"
#include "backend/c10d/rendezvous.h"
#include "backend/common/deadline.h"
#include "backend/common/settings.h"

namespace farandole::backend {
namespace {

// How long a group that is destroyed waits for what is under way: others that are late come, others that have failed do
// not.
constexpr std::chrono::seconds kPatienceAtEnd{10};

template <typename T>
T valueOrThrow(Result<T> result) {
  throwIfError(result.status());
  return std::move(result).value();
}

// Why a group is over.
::c10d::ErrorType errorTypeOf(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk: return ::c10d::ErrorType::SUCCESS;
    case StatusCode::kTimeout: return ::c10d::ErrorType::TIMEOUT;
    case StatusCode::kPeerFailed:
    case StatusCode::kPeerLeft: return ::c10d::ErrorType::REMOTE_ERROR;
    default: return ::c10d::ErrorType::COMM_ERROR;
  }
}

// By rank; empty where they are not known.
std::vector<int> globalRanksOf(const ProcessGroupFarandole::Options& options, int size) {
  const auto& ranks = options.global_ranks_in_group;
  if (ranks.size() != static_cast<std::size_t>(size)) return {};
  return {ranks.begin(), ranks.end()};
}

std::string misfitOf(int rank, int size) {
  if (size < 1 || size > p2p::kMaxRanks) {
    return "size is " + std::to_string(size) + "; expected 1 to " + std::to_string(p2p::kMaxRanks);
  }
  return rank < size ? "" : "rank is " + std::to_string(rank) + "; expected 0 to " + std::to_string(size - 1);
}

// What a group needs of its process.
struct Preparations {
  collective::AlgorithmTable table;
  std::string cudaMessages;
  std::size_t windowBytes;
  std::shared_ptr<ProcessContext> context;
  std::uint32_t group;  // its number
};

Result<Preparations> prepare() {
  auto table = collective::AlgorithmTable::fromEnvironment();
  FARANDOLE_RETURN_IF_ERROR(table.status());
  auto cudaMessages = choiceSetting("FARANDOLE_CUDA_MESSAGES", "nccl", {"nccl", "ucx"});
  FARANDOLE_RETURN_IF_ERROR(cudaMessages.status());
  const auto windowBytes = collective::HostSegment::windowBytesSetting();
  FARANDOLE_RETURN_IF_ERROR(windowBytes.status());
  auto context = ProcessContext::acquire();
  FARANDOLE_RETURN_IF_ERROR(context.status());
  const auto group = (*context)->takeGroupNumber();
  FARANDOLE_RETURN_IF_ERROR(group.status());
  return Preparations{std::move(*table), std::move(*cudaMessages), *windowBytes, std::move(*context), *group};
}

}  // namespace

ProcessGroupFarandole::ProcessGroupFarandole(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                                             c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      options_(std::move(options)),
      timeout_(options_->timeout),
      lastChildStore_(c10::intrusive_ptr<::c10d::Store>()) {
  TORCH_CHECK_VALUE(store != nullptr, "farandole: store is None; expected a store that all ranks share");
  TORCH_CHECK_VALUE(rank >= 0, "farandole: rank is ", rank, "; expected 0 or more");
  if (const std::string misfit = misfitOf(rank, size); !misfit.empty()) {
    refuse(store, rank, size, *options_, misfit);
    TORCH_CHECK_VALUE(false, "farandole: ", misfit);
  }
  MeetingPlace place(store, rank, size, globalRanksOf(*options_, size), options_->timeout);
  const std::shared_ptr<const GroupFlight> flight = valueOrThrow(place.orGiveUp(startFlight()));
  auto [table, cudaMessages, windowBytes, context, group] = valueOrThrow(place.orGiveUp(prepare()));
  context_ = std::move(context);
  // The number is free again once nothing that carries it is in flight.
  std::shared_ptr<void> lease(
      nullptr, [context = context_, number = group, flight](void*) { context->returnGroupNumber(number); });

  Meeting met = valueOrThrow(place.meetMembers(*context_, group, {table.overrides(), cudaMessages}));
  store_ = place.store();
  communicator_ = std::make_shared<Communicator>(context_->connections(), lease, rank, met.members, std::move(table));
  if (!met.controls.empty()) {
    watch_ = valueOrThrow(place.orGiveUp(ControlWatch::join(context_, communicator_, met, counts_)));
    communicator_->setWatch(watch_);
  }
  connectHost(place, windowBytes);
  if (cudaMessages == "ucx") meetForCudaMessages(place, met.members, std::move(lease));
  context_->addGroup(place.world(), communicator_);
}

void ProcessGroupFarandole::refuse(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                                   const Options& options, const std::string& reason) {
  if (store == nullptr || rank < 0) return;
  MeetingPlace place(store, rank, size, globalRanksOf(options, size), options.timeout);
  (void)place.giveUp(Status::invalidArgument(reason));
}

void ProcessGroupFarandole::connectHost(MeetingPlace& place, std::size_t windowBytes) {
  const Status connected =
      communicator_->connectHost(deadlineIn(options_->timeout), windowBytes, [&] { return place.givenUp(); });
  if (connected) return;
  // Some may still be waiting, others have gone on.
  if (watch_ != nullptr) watch_->abort(connected.toString());
  throwIfError(place.giveUp(connected));
}

ProcessGroupFarandole::~ProcessGroupFarandole() {
  if (communicator_ == nullptr) return;
  if (!context_->isOurs()) {
    // In a forked child: locks may be held by threads that do not exist here.
    new std::shared_ptr<Communicator>(std::move(communicator_));
    new std::shared_ptr<ProcessContext>(std::move(context_));
    new std::shared_ptr<CudaMessages>(std::move(cudaMessages_));
    return;
  }
  close();  // at once: the program may be ending for an error, after which others will not come
}

void ProcessGroupFarandole::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  if (flight_ != nullptr) flight_->rename(uid);
}

Result<std::shared_ptr<const GroupFlight>> ProcessGroupFarandole::startFlight() {
  const Result<FlightLog*> log = FlightLog::acquire();
  FARANDOLE_RETURN_IF_ERROR(log.status());
  if ((*log)->recorder() == nullptr) return std::shared_ptr<const GroupFlight>();
  const auto& ranks = options_->global_ranks_in_group;
  auto flight = std::make_shared<const GroupFlight>(
      **log, observe::FlightGroup{options_->group_name, "", rank_, std::vector<int>(ranks.begin(), ranks.end())}, size_,
      counts_);
  flight_ = flight.get();
  return flight;
}

void ProcessGroupFarandole::describeFlight() {
  flight_->describe(getGroupDesc());
  isFlightDescribed_ = true;
}

std::uint64_t ProcessGroupFarandole::getSequenceNumberForGroup() { return counts_->collectives.load(); }

::c10d::ErrorType ProcessGroupFarandole::getError() {
  if (const auto cuda = cudaIfAny(); cuda != nullptr && !cuda->status()) return errorTypeOf(cuda->status());
  transport::ProgressEngine::Access access(context_->connections().engine());
  return errorTypeOf(communicator_->usable());
}

void ProcessGroupFarandole::abort() {
  if (!context_->isOurs()) return;
  context_->removeGroup(communicator_);
  const Status status = Status::aborted("the process group was aborted");
  // First, for it to hear of no end that others have told.
  if (const auto cuda = cudaIfAny()) cuda->abort(status);
  communicator_->abortAll(status);
  if (watch_ != nullptr) watch_->abort("ProcessGroup.abort() was called there");
  hooks_->startAbortHooks();
  if (flight_ != nullptr) flight_->fail();
}

void ProcessGroupFarandole::shutdown() {
  if (!context_->isOurs()) return;
  communicator_->finishCollectives(transport::Clock::now() + kPatienceAtEnd);
  close();
}

void ProcessGroupFarandole::close() {
  context_->removeGroup(communicator_);
  if (flight_ != nullptr) flight_->ignoreFailures();
  if (const auto cuda = cudaIfAny()) cuda->close();
  communicator_->abort(Status::aborted("the process group was shut down"));
  if (watch_ != nullptr) watch_->leave();
}

c10::intrusive_ptr<ProcessGroupFarandole::Options> ProcessGroupFarandole::copyOptions() const {
  auto copy = c10::make_intrusive<Options>(*options_);
  copy->timeout = timeout_;
  return copy;
}

void ProcessGroupFarandole::registerOnCompletionHook(WorkHooks::InfoHook&& hook) {
  TORCH_CHECK(onCompletionHook_ == nullptr, "farandole: this group has an onCompletion hook already; expected one");
  auto shared = std::make_shared<const WorkHooks::InfoHook>(std::move(hook));
  onCompletionHook_ = [shared](std::shared_ptr<::c10d::WorkInfo> info) { (*shared)(std::move(info)); };
  hooks_->setInfoHook(std::move(shared));
}

void ProcessGroupFarandole::registerCompletionHook(std::int64_t id, CompletionHook hook) {
  hooks_->addCompletionHook(id, std::move(hook));
}

void ProcessGroupFarandole::registerAbortHook(std::int64_t id, std::function<void()> hook) {
  hooks_->addAbortHook(id, std::move(hook));
}

WorkOptions ProcessGroupFarandole::workOptions(::c10d::OpType type, const char* title,
                                               std::chrono::milliseconds timeout, std::uint64_t count) {
  TORCH_CHECK(context_->isOurs(), title,
              ": this process was forked from the one that made the group; expected a group that it has made itself");
  checkOwnTimeout(title, timeout);
  // A batch involves some ranks only: counting it as a collective would set them apart.
  const bool isPointToPoint = ::c10d::isP2POp(type) || type == ::c10d::OpType::COALESCED;
  if (flight_ != nullptr && !isFlightDescribed_.load(std::memory_order_relaxed)) describeFlight();
  return {rank_,
          type,
          title,
          isPointToPoint ? counts_->pointToPoint.fetch_add(count, std::memory_order_relaxed)
                         : counts_->collectives.fetch_add(1, std::memory_order_relaxed),
          (isUnset(timeout) ? timeout_.load(std::memory_order_relaxed) : timeout) + hooks_->extraTimeout(),
          hooks_->follow(),
          hooks_->areTold(),
          flight_,
          hooks_->keyIfTold()};
}

std::string ProcessGroupFarandole::transportOf(int rank) {
  return rank == rank_ ? "self" : communicator_->transportOf(rank);
}

}  // namespace farandole::backend
