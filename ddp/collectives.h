#pragma once

#include <ATen/ATen.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace farandole::ddp {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Collectives by one name for every torch. `part` may lie in `whole`, at this rank's place.
WorkPtr allReduce(c10d::ProcessGroup& group, at::Tensor& data, const c10d::ReduceOp& op);
WorkPtr reduceScatter(c10d::ProcessGroup& group, at::Tensor& part, at::Tensor& whole, const c10d::ReduceOp& op);
// Part r of `sent` goes to rank r, and its part comes to place r of `received`. Without splits parts are equal.
WorkPtr allToAll(c10d::ProcessGroup& group, at::Tensor& received, at::Tensor& sent,
                 std::vector<int64_t> receivedSplits = {}, std::vector<int64_t> sentSplits = {});
WorkPtr allGather(c10d::ProcessGroup& group, at::Tensor& whole, at::Tensor& part);

// What each rank says, by rank; waits for it. `device` is one that the group has a backend for.
std::vector<at::Tensor> gatherTensors(c10d::ProcessGroup& group, at::Tensor mine, c10::Device device);
std::vector<std::string> gatherTexts(c10d::ProcessGroup& group, const std::string& mine, c10::Device device);

// Whether the group's backend can average, without a pass over the data of its own.
bool averages(c10d::ProcessGroup& group, c10::DeviceType device);

bool isGloo(c10d::ProcessGroup& group, c10::DeviceType device);

// Whether what ranks tell each other can go from CPU to CPU, so that no device is waited for.
bool hasCpuBackend(c10d::ProcessGroup& group);

}  // namespace farandole::ddp
