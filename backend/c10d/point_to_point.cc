#include <ATen/record_function.h>

#include <algorithm>

#include "backend/c10d/batches.h"
#include "backend/c10d/errors.h"
#include "backend/c10d/joint_work.h"
#include "backend/c10d/process_group.h"
#include "backend/c10d/repeated_messages.h"
#include "backend/c10d/tensor_checks.h"

namespace farandole::backend {

using ::c10d::OpType;
using p2p::Direction;

namespace {

void checkTag(const char* operation, int tag) {
  TORCH_CHECK_VALUE(tag >= 0, operation, ": tag is ", tag, "; expected 0 or more");
}

}  // namespace

WorkPtr ProcessGroupFarandole::send(Tensors& tensors, int dstRank, int tag) {
  return pointToPoint(Direction::kSend, tensors, dstRank, tag);
}

WorkPtr ProcessGroupFarandole::recv(Tensors& tensors, int srcRank, int tag) {
  return pointToPoint(Direction::kRecv, tensors, srcRank, tag);
}

WorkPtr ProcessGroupFarandole::pointToPoint(Direction direction, Tensors& tensors, int peer, int tag) {
  const bool isSend = direction == Direction::kSend;
  const char* const name = isSend ? "send" : "recv";
  const auto check = [&] {
    checkSingle(name, "tensor", tensors);
    checkRank(name, isSend ? "dst" : "src", peer, size_);
    checkTag(name, tag);
  };
  if (Batch* const batch = openBatch_->find()) {
    const std::uint64_t key = hooks_->keyIfTold();
    try {
      check();
      batch->entries.push_back({direction, tensors[0], peer, tag, key});
    } catch (...) {
      batch->noteRefusal();
    }
    return c10::make_intrusive<BatchMemberWork>(rank_, batch->work, key);
  }
  check();
  if (tensors[0].is_cuda()) {
    auto works = postOnCuda({{direction, tensors[0], peer, tag}}, "", nullptr);
    return std::move(works.begin()->second);
  }
  auto work = c10::make_intrusive<MessagesWork>(
      communicator_, workOptions(isSend ? OpType::SEND : OpType::RECV, isSend ? "farandole:send" : "farandole:recv",
                                 ::c10d::kUnsetTimeout));
  work->setItem({tensors[0], peer, static_cast<std::uint32_t>(tag), isSend});
  work->launch();
  return work;
}

WorkPtr ProcessGroupFarandole::recvAnysource(Tensors& tensors, int tag) {
  const LeavingByError leaving(*openBatch_);
  checkSingle("recv", "tensor", tensors);
  checkTag("recv", tag);
  TORCH_CHECK_VALUE(!tensors[0].is_cuda() || cudaMessages_ != nullptr,
                    "recv: src is any rank; expected a rank for a tensor on CUDA, or FARANDOLE_CUDA_MESSAGES=ucx");
  TORCH_CHECK_VALUE(openBatch_->find() == nullptr,
                    "recv: src is any rank inside a batch; expected a rank, a batch is ordered by peer");
  if (tensors[0].is_cuda()) {
    auto works = postOnUcx({{Direction::kRecv, tensors[0], collective::kAnySource, tag}}, "", nullptr);
    return std::move(works.begin()->second);
  }
  auto work = c10::make_intrusive<MessagesWork>(
      communicator_, workOptions(OpType::RECVANYSOURCE, "farandole:recvAnySource", ::c10d::kUnsetTimeout));
  work->setItem({tensors[0], collective::kAnySource, static_cast<std::uint32_t>(tag), false});
  work->launch();
  return work;
}

Result<std::unique_ptr<RepeatedMessage>> ProcessGroupFarandole::repeat(const RepeatedMessageSpec& spec) {
  return makeRepeatedMessage(context_, communicator_, counts_, flight_, timeout_, spec);
}

void ProcessGroupFarandole::startCoalescing() { openBatch_->open(); }

WorkPtr ProcessGroupFarandole::endCoalescing() {
  Batch batch = openBatch_->take();
  if (batch.refusal != nullptr) std::rethrow_exception(batch.refusal);
  std::vector<WorkPtr> works = std::move(batch.collectives);
  const auto report = batch.entries.empty() ? nullptr : PartsReport::of(hooks_->follow());
  for (auto& [peer, work] : postBatch(std::move(batch.entries), "", report)) works.push_back(std::move(work));
  if (report != nullptr) report->close();
  WorkPtr whole;
  if (works.size() == 1) {
    whole = works[0];
  } else {
    whole = c10::make_intrusive<JointWork>(rank_, OpType::COALESCED, std::move(works));
  }
  batch.work->set(whole);
  return whole;
}

std::map<int, WorkPtr> ProcessGroupFarandole::batchP2p(std::vector<BatchEntry> entries, const std::string& label) {
  for (const BatchEntry& entry : entries) {
    checkTensor("batch_p2p", "tensor", entry.tensor);
    checkRank("batch_p2p", entry.direction == Direction::kSend ? "dst" : "src", entry.peer, size_);
    checkTag("batch_p2p", entry.tag);
  }
  return postBatch(std::move(entries), label, nullptr);
}

std::map<int, WorkPtr> ProcessGroupFarandole::postBatch(std::vector<BatchEntry> entries, const std::string& label,
                                                        const std::shared_ptr<PartsReport>& report) {
  RECORD_FUNCTION(label.empty() ? "farandole:batch_p2p" : "farandole:batch_p2p " + label, {});
  const auto onCuda = std::stable_partition(entries.begin(), entries.end(),
                                            [](const BatchEntry& entry) { return !entry.tensor.is_cuda(); });
  if (onCuda == entries.end()) return postOnCpu(std::move(entries), label, report);
  std::vector<BatchEntry> rest(std::make_move_iterator(onCuda), std::make_move_iterator(entries.end()));
  entries.erase(onCuda, entries.end());
  std::map<int, WorkPtr> works = postOnCpu(std::move(entries), label, report);
  for (auto& [peer, work] : postOnCuda(std::move(rest), label, report)) {
    WorkPtr& one = works[peer];
    if (one != nullptr) {
      work = c10::make_intrusive<JointWork>(rank_, OpType::COALESCED, std::vector{std::move(one), std::move(work)});
    }
    one = std::move(work);
  }
  return works;
}

std::map<int, WorkPtr> ProcessGroupFarandole::postOnCpu(std::vector<BatchEntry> entries, const std::string& label,
                                                        const std::shared_ptr<PartsReport>& report) {
  std::map<int, WorkPtr> works;
  forEachPeer(rank_, size_, std::move(entries), [&](int peer, std::vector<MessagesOperation::Item> items) {
    WorkOptions options = workOptions(OpType::COALESCED, "farandole:batch_p2p", ::c10d::kUnsetTimeout, items.size());
    if (report != nullptr) options.onDone = report->expect();
    auto work = c10::make_intrusive<MessagesWork>(communicator_, std::move(options));
    work->setItems(std::move(items), label);
    work->launch();
    works.emplace(peer, std::move(work));
  });
  return works;
}

}  // namespace farandole::backend
