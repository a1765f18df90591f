#include "ddp/comm_hook.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "ddp/abandonment.h"
#include "ddp/hook_failure.h"

namespace farandole::ddp {

void CommHook::check(const ModelBuffers& buffers, const DataParallelGroups& groups) {
  TORCH_CHECK_VALUE(!buffers.isSharded(),
                    "farandole.ddp: register_comm_hook with use_distributed_optimizer=True, which reduces to the rank "
                    "that owns a part: expected False");
  TORCH_CHECK_VALUE(!groups.dense.instances,
                    "farandole.ddp: register_comm_hook with several optimizer instances: expected one");
  const auto& parameters = buffers.parameters();
  const bool hasExperts = std::any_of(parameters.begin(), parameters.end(),
                                      [](const ModelParameter& parameter) { return parameter.isExpert; });
  TORCH_CHECK_VALUE(!hasExperts || groups.experts.group == groups.dense.group,
                    "farandole.ddp: register_comm_hook with experts in a group of their own, which a hook cannot tell "
                    "from the others: expected one group");
}

CommHook::CommHook(std::shared_ptr<c10d::CommHookInterface> hook, std::shared_ptr<const ModelBuffers> buffers,
                   Group group)
    : hook_(std::move(hook)), buffers_(std::move(buffers)), group_(std::move(group)) {}

CommHook::Future CommHook::run(int bucket) {
  const Layout& layout = buffers_->layout();
  const BucketLayout& range = layout.buckets[bucket];
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> parameters;
  for (const int parameter : range.parameters) {
    const Slot& slot = layout.slots[parameter];
    offsets.push_back(static_cast<std::size_t>(slot.offset - range.begin));
    lengths.push_back(static_cast<std::size_t>(slot.numel));
    parameters.push_back(buffers_->parameters()[parameter].tensor);
    sizes.push_back(buffers_->parameters()[parameter].tensor.sizes());
  }
  c10d::GradBucket argument(static_cast<std::size_t>(bucket), layout.buckets.size(), buffers_->gradsOf(bucket),
                            std::move(offsets), std::move(lengths), std::move(sizes), std::move(parameters),
                            std::nullopt);
  try {
    return hook_->runHook(argument);
  } catch (const std::exception&) {
    throw HookFailure(bucket, std::current_exception());
  }
}

void CommHook::finish(int bucket, c10::ivalue::Future& future) {
  at::Tensor data = buffers_->gradsOf(bucket);
  await(*group_, data.device().type(), future);
  try {
    future.waitAndThrow();
    const at::Tensor result = hook_->parseHookResult(future.value());
    TORCH_CHECK(result.numel() == data.numel(), "farandole.ddp: the communication hook's result for bucket ", bucket,
                " has ", result.numel(), " elements: expected ", data.numel(), ", as the bucket");
    if (result.is_alias_of(data) && result.data_ptr() == data.data_ptr()) return;
    c10::NoGradGuard noGrad;
    data.copy_(result.view(-1));
  } catch (const std::exception&) {
    throw HookFailure(bucket, std::current_exception());
  }
}

}  // namespace farandole::ddp
