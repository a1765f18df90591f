// The process group's CUDA half: when it is made, and what it is told and tells.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/c10d/batches.h"
#include "backend/c10d/edge_messages.h"
#include "backend/c10d/errors.h"
#include "backend/c10d/process_group.h"
#include "backend/c10d/store_gathering.h"
#include "backend/c10d/tensor_checks.h"
#include "backend/common/deadline.h"

namespace farandole::backend {

using ::c10d::OpType;

std::shared_ptr<CudaGroup> ProcessGroupFarandole::cudaIfAny() {
  std::lock_guard lock(cudaMutex_);
  return cuda_;
}

std::function<Status()> ProcessGroupFarandole::ranksHealth() const {
  return [communicator = communicator_] {
    transport::ProgressEngine::Access access(communicator->engine());
    return communicator->usable();
  };
}

CudaGroup& ProcessGroupFarandole::cuda() {
  std::lock_guard lock(cudaMutex_);
  if (cuda_ != nullptr) return *cuda_;
  CudaGroup::Setup setup;
  // A connection of its own: one that waits for ranks must not hold up the caller's use of the store.
  setup.store = c10::make_intrusive<::c10d::PrefixStore>("cuda", store_->clone());
  setup.talk = std::make_shared<EdgeMessages>(communicator_);
  setup.name = options_->group_name.empty() ? "farandole" : options_->group_name;
  setup.rank = rank_;
  setup.size = size_;
  setup.timeout = timeout_;
  setup.ranksHealth = ranksHealth();
  setup.onFailure = [communicator = communicator_, watch = watch_, hooks = hooks_, flight = flight_](const Status& why,
                                                                                                     bool ranksKnow) {
    if (!ranksKnow) {
      communicator->abortAll(why);
      if (watch != nullptr) watch->abort(why.toString());
    }
    hooks->startAbortHooks();
    if (flight != nullptr) flight->fail();
  };
  auto made = CudaGroup::make(setup);
  throwIfError(made.status().wrapUnlessOk("tensors on CUDA"));
  cuda_ = std::move(*made);
  return *cuda_;
}

void ProcessGroupFarandole::connectFrom(ProcessGroupFarandole& parent, const std::vector<int>& excluded) {
  const auto theirs = parent.cudaIfAny();
  const std::vector<int> devices = theirs != nullptr ? theirs->connectedDevices() : std::vector<int>();
  std::string text;
  for (const int device : devices) text += std::to_string(device) + " ";
  // They have just met: nobody is waited for that does something else.
  const auto agreed =
      StoreGathering(*store_, "farandole/devices", size_).agree(text, deadlineIn(timeout_.load()), ranksHealth());
  throwIfError(agreed.status().wrapUnlessOk("shrink"));
  if (*agreed && !devices.empty()) cuda().connectFrom(*theirs, devices, excluded);
}

void ProcessGroupFarandole::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cuda()) cuda().connect(device);
}

void ProcessGroupFarandole::connectEdges(at::Device device, const std::vector<int>& sendTo,
                                         const std::vector<int>& recvFrom) {
  TORCH_CHECK_VALUE(device.is_cuda() && device.has_index(), "connect_edges: device is ", device,
                    "; expected a CUDA device with an index, tensors on the CPU need no connecting");
  for (const int peer : sendTo) checkRank("connect_edges", "send_to", peer, size_);
  for (const int peer : recvFrom) checkRank("connect_edges", "recv_from", peer, size_);
  // UCX connects by itself.
  if (cudaMessages_ == nullptr) cuda().connectEdges(device, sendTo, recvFrom);
}

void ProcessGroupFarandole::meetForCudaMessages(MeetingPlace& place, const std::vector<collective::Member>& members,
                                                std::shared_ptr<void> keepAlive) {
  auto met = CudaMessages::meet(place, {communicator_, members, watch_, std::move(keepAlive), rank_});
  throwIfError(met.status());
  cudaMessages_ = std::move(met).value();
}

std::map<int, WorkPtr> ProcessGroupFarandole::postOnCuda(std::vector<BatchEntry> entries, const std::string& label,
                                                         const std::shared_ptr<PartsReport>& report) {
  const at::Device device = entries[0].tensor.device();
  for (const BatchEntry& entry : entries) {
    TORCH_CHECK_VALUE(entry.tensor.device() == device, "a batch has tensors on ", device, " and on ",
                      entry.tensor.device(), "; expected one CUDA device");
  }
  return cudaMessages_ != nullptr ? postOnUcx(std::move(entries), label, report)
                                  : postOnNccl(std::move(entries), report);
}

std::map<int, WorkPtr> ProcessGroupFarandole::postOnUcx(std::vector<BatchEntry> entries, const std::string& label,
                                                        const std::shared_ptr<PartsReport>& report) {
  for (const BatchEntry& entry : entries) throwIfError(cudaMessages_->canReach(entry.peer));
  auto mark = cudaMessages_->mark(entries[0].tensor.device());
  throwIfError(mark.status());
  const bool isBatch = entries.size() > 1;
  std::map<int, WorkPtr> works;
  forEachPeer(rank_, size_, std::move(entries), [&](int peer, std::vector<MessagesOperation::Item> items) {
    const bool isSend = items[0].isSend;
    const OpType type = isBatch                          ? OpType::COALESCED
                        : peer == collective::kAnySource ? OpType::RECVANYSOURCE
                        : isSend                         ? OpType::SEND
                                                         : OpType::RECV;
    const char* const title = isBatch ? "farandole:batch_p2p" : isSend ? "farandole:send" : "farandole:recv";
    WorkOptions options = workOptions(type, title, ::c10d::kUnsetTimeout, items.size());
    if (report != nullptr) options.onDone = report->expect();
    auto work = c10::make_intrusive<GatedMessagesWork>(cudaMessages_->communicator(), std::move(options));
    work->setItems(std::move(items), label);
    cudaMessages_->launch(work, *mark);
    works.emplace(peer, std::move(work));
  });
  return works;
}

std::map<int, WorkPtr> ProcessGroupFarandole::postOnNccl(std::vector<BatchEntry> entries,
                                                         std::shared_ptr<PartsReport> report) {
  const at::Device device = entries[0].tensor.device();
  std::vector<CudaMessage> messages;
  messages.reserve(entries.size());
  for (BatchEntry& entry : entries) {
    messages.push_back({entry.direction == p2p::Direction::kSend, std::move(entry.tensor), entry.peer,
                        static_cast<std::uint32_t>(entry.tag), entry.key});
  }
  const bool isBatch = messages.size() > 1;
  const OpType type = isBatch ? OpType::COALESCED : messages[0].isSend ? OpType::SEND : OpType::RECV;
  const char* const title = isBatch ? "farandole:batch_p2p" : messages[0].isSend ? "farandole:send" : "farandole:recv";
  WorkOptions options = workOptions(type, title, ::c10d::kUnsetTimeout, messages.size());
  if (!isBatch && messages[0].key == 0) messages[0].key = options.key;
  // Each message tells of its own end.
  const bool isOwnReport = report == nullptr && isBatch;
  if (isOwnReport) report = PartsReport::of(options.onDone);
  if (report != nullptr) options.onDone = report->expect(messages.size());
  auto works = cuda().post(options, device, std::move(messages));
  if (isOwnReport && report != nullptr) report->close();
  return works;
}

}  // namespace farandole::backend
