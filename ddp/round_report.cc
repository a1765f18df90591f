#include "ddp/round_report.h"

#include <algorithm>
#include <utility>

#include "ddp/abandonment.h"

namespace farandole::ddp {

bool RoundReport::canTell(const Replicas& replicas) {
  return hasCpuBackend(*replicas.group) && (!replicas.instances || hasCpuBackend(*replicas.instances));
}

RoundReport::Largest::Largest(Replicas ranks, size_t count)
    : replicas(std::move(ranks)),
      isShared(replicas.size() > 1 && canTell(replicas)),
      values(at::zeros({static_cast<int64_t>(count)}, at::kInt)) {}

void RoundReport::Largest::start() {
  work = isShared && values.numel() > 0 ? allReduce(*replicas.group, values, c10d::ReduceOp::MAX) : nullptr;
}

void RoundReport::Largest::finish() {
  const WorkPtr ours = std::exchange(work, nullptr);
  if (!ours) return;
  await(*replicas.group, c10::kCPU, *ours);
  if (!replicas.instances) return;
  await(*replicas.instances, c10::kCPU, *allReduce(*replicas.instances, values, c10d::ReduceOp::MAX));
}

RoundReport::RoundReport(const DataParallelGroups& groups, const std::vector<char>& isOfExperts)
    : isOfExperts_(isOfExperts),
      ofAll_(groups.dense, isOfExperts.size() + 1),
      ofExperts_(groups.experts,
                 std::find(isOfExperts.begin(), isOfExperts.end(), 1) == isOfExperts.end() ? 0 : isOfExperts.size()) {}

void RoundReport::start(std::string trouble, const std::vector<char>& flags) {
  trouble_ = std::move(trouble);
  ofAll_.data()[0] = trouble_.empty() ? 0 : 1;
  for (size_t i = 0; i < flags.size(); ++i) {
    (isOfExperts_[i] != 0 ? ofExperts_.data()[i] : ofAll_.data()[i + 1]) = flags[i];
  }
  ofAll_.start();
  ofExperts_.start();
}

std::string RoundReport::finish() {
  ofAll_.finish();
  ofExperts_.finish();
  if (ofAll_.data()[0] == 0) return "";
  if (!ofAll_.isShared) return trouble_;
  std::string all;
  for (const std::string& text : gatherTexts(*ofAll_.replicas.group, trouble_, c10::kCPU)) {
    if (!text.empty()) all += (all.empty() ? "" : "\n") + text;
  }
  return all.empty() ? "a rank of another optimizer instance has failed" : all;
}

bool RoundReport::flag(size_t index) const {
  if (isOfExperts_[index] != 0) return ofExperts_.values.const_data_ptr<int>()[index] != 0;
  return ofAll_.values.const_data_ptr<int>()[index + 1] != 0;
}

std::vector<int> RoundReport::agree(const Replicas& replicas, const std::vector<int>& mine) const {
  if (replicas.size() == 1 || !canTell(replicas)) return mine;
  at::Tensor values = at::tensor(mine, at::kInt);
  for (const Group& group : {replicas.instances, replicas.group}) {
    if (!group) continue;
    std::vector<at::Tensor> tensors = {values};
    await(*group, c10::kCPU, *group->broadcast(tensors));
  }
  const auto* first = values.const_data_ptr<int>();
  return {first, first + values.numel()};
}

}  // namespace farandole::ddp
