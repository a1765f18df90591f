#include "ddp/collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace farandole::ddp {
namespace {

// Newer torch has other names for these, and deprecates those that it had.
template <typename ProcessGroup>
WorkPtr reduceScatterBase(ProcessGroup& group, at::Tensor& part, at::Tensor& whole,
                          const c10d::ReduceScatterOptions& options) {
  if constexpr (requires { group.reduce_scatter_single(part, whole, options); }) {
    return group.reduce_scatter_single(part, whole, options);
  } else {
    return group._reduce_scatter_base(part, whole, options);
  }
}

template <typename ProcessGroup>
WorkPtr allGatherBase(ProcessGroup& group, at::Tensor& whole, at::Tensor& part) {
  if constexpr (requires { group.all_gather_single(whole, part); }) {
    return group.all_gather_single(whole, part);
  } else {
    return group._allgather_base(whole, part);
  }
}

template <typename ProcessGroup>
WorkPtr allToAllBase(ProcessGroup& group, at::Tensor& received, at::Tensor& sent, std::vector<int64_t>& receivedSplits,
                     std::vector<int64_t>& sentSplits) {
  if constexpr (requires { group.all_to_all_single(received, sent, receivedSplits, sentSplits); }) {
    return group.all_to_all_single(received, sent, receivedSplits, sentSplits);
  } else {
    return group.alltoall_base(received, sent, receivedSplits, sentSplits);
  }
}

}  // namespace

WorkPtr allReduce(c10d::ProcessGroup& group, at::Tensor& data, const c10d::ReduceOp& op) {
  std::vector<at::Tensor> tensors = {data};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return group.allreduce(tensors, options);
}

WorkPtr reduceScatter(c10d::ProcessGroup& group, at::Tensor& part, at::Tensor& whole, const c10d::ReduceOp& op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = op;
  return reduceScatterBase(group, part, whole, options);
}

WorkPtr allToAll(c10d::ProcessGroup& group, at::Tensor& received, at::Tensor& sent, std::vector<int64_t> receivedSplits,
                 std::vector<int64_t> sentSplits) {
  return allToAllBase(group, received, sent, receivedSplits, sentSplits);
}

WorkPtr allGather(c10d::ProcessGroup& group, at::Tensor& whole, at::Tensor& part) {
  return allGatherBase(group, whole, part);
}

std::vector<at::Tensor> gatherTensors(c10d::ProcessGroup& group, at::Tensor mine, c10::Device device) {
  mine = mine.to(device);
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group.getSize(); ++rank) outputs[0].push_back(at::empty_like(mine));
  std::vector<at::Tensor> inputs = {mine};
  group.allgather(outputs, inputs)->wait();
  for (at::Tensor& output : outputs[0]) output = output.cpu();
  return outputs[0];
}

std::vector<std::string> gatherTexts(c10d::ProcessGroup& group, const std::string& mine, c10::Device device) {
  const at::Tensor length = at::scalar_tensor(static_cast<int64_t>(mine.size()), at::kLong).view(1);
  std::vector<int64_t> lengths;
  for (const at::Tensor& theirs : gatherTensors(group, length, device)) lengths.push_back(theirs.item<int64_t>());
  at::Tensor text = at::zeros({*std::max_element(lengths.begin(), lengths.end())}, at::kByte);
  std::memcpy(text.mutable_data_ptr(), mine.data(), mine.size());
  std::vector<std::string> texts;
  for (const at::Tensor& theirs : gatherTensors(group, text, device)) {
    texts.emplace_back(static_cast<const char*>(theirs.const_data_ptr()), lengths[texts.size()]);
  }
  return texts;
}

bool averages(c10d::ProcessGroup& group, c10::DeviceType device) {
  const std::string name = group.getBackend(device)->getBackendName();
  return name == "farandole" || name == "nccl";
}

bool isGloo(c10d::ProcessGroup& group, c10::DeviceType device) {
  return group.getBackend(device)->getBackendName() == "gloo";
}

bool hasCpuBackend(c10d::ProcessGroup& group) {
  const auto devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(), [](c10::Device device) { return device.is_cpu(); });
}

}  // namespace farandole::ddp
