#include "ddp/round_report.h"

#include <algorithm>
#include <utility>

#include "ddp/abandonment.h"

namespace farandole::ddp {

bool RoundReport::canTell(const Replicas& replicas) {
  return hasCpuBackend(*replicas.group) && (!replicas.instances || hasCpuBackend(*replicas.instances));
}

RoundReport::RoundReport(const DataParallelGroups& groups, size_t flags)
    : replicas_(groups.dense),
      isShared_(groups.dense.size() > 1 && canTell(groups.dense)),
      values_(at::zeros({static_cast<int64_t>(flags) + 1}, at::kInt)) {}

void RoundReport::start(std::string trouble, const std::vector<char>& flags) {
  trouble_ = std::move(trouble);
  auto* values = values_.mutable_data_ptr<int>();
  values[0] = trouble_.empty() ? 0 : 1;
  std::copy(flags.begin(), flags.end(), values + 1);
  work_ = isShared_ ? allReduce(*replicas_.group, values_, c10d::ReduceOp::MAX) : nullptr;
}

std::string RoundReport::finish() {
  if (WorkPtr work = std::exchange(work_, nullptr)) await(*replicas_.group, c10::kCPU, *work);
  if (isShared_ && replicas_.instances) {
    await(*replicas_.instances, c10::kCPU, *allReduce(*replicas_.instances, values_, c10d::ReduceOp::MAX));
  }
  if (values_.const_data_ptr<int>()[0] == 0) return "";
  if (!isShared_) return trouble_;
  std::string all;
  for (const std::string& text : gatherTexts(*replicas_.group, trouble_, c10::kCPU)) {
    if (!text.empty()) all += (all.empty() ? "" : "\n") + text;
  }
  return all.empty() ? "a rank of another optimizer instance has failed" : all;
}

bool RoundReport::flag(size_t index) const { return values_.const_data_ptr<int>()[index + 1] != 0; }

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
