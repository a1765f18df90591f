#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "ddp/model_buffers.h"

namespace farandole::ddp {

// A communication hook of torch's DDP in the place of a reduction: it gets a bucket with this rank's gradients, and its
// result replaces them. Buckets are numbered as the layout has them. Not synchronized: its GradReducer is.
class CommHook {
 public:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;

  // Throws where a hook cannot do what these buffers and groups need.
  static void check(const ModelBuffers& buffers, const DataParallelGroups& groups);

  CommHook(std::shared_ptr<c10d::CommHookInterface> hook, std::shared_ptr<const ModelBuffers> buffers, Group group);

  // Throws a HookFailure, as finish().
  Future run(int bucket);

  // Waits; the result is in the bucket then. Fails where the hook's future has failed, and where its result is no
  // tensor of the bucket's size; throws as await() where the group is given up.
  void finish(int bucket, c10::ivalue::Future& future);

 private:
  const std::shared_ptr<c10d::CommHookInterface> hook_;
  const std::shared_ptr<const ModelBuffers> buffers_;
  const Group group_;
};

}  // namespace farandole::ddp
