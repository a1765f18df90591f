#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

namespace farandole::ddp {

// Calls `reached` when a backward comes to one of the tensors that a forward has returned, before it goes on to what
// they were computed from; on the thread that runs the backward, without the GIL, once for each operation that made
// some of them. A hook on these operations: the tensors are the same, and may be views or be changed in place after.
void onBackwardOf(const std::vector<at::Tensor>& outputs, const std::function<void()>& reached);

}  // namespace farandole::ddp
