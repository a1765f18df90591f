#pragma once

#include <c10/util/Exception.h>

namespace farandole::ddp {

// A graph of backward that is compiled as a whole has no place for hooks in C++, as torch's reducer has found.
[[noreturn]] inline void refuseCompiledBackward() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "farandole.ddp: compiled autograd does not run the hooks that average gradients: expected "
      "torch._dynamo.config.compiled_autograd=False, and backward() outside of torch._dynamo.compiled_autograd");
}

}  // namespace farandole::ddp
