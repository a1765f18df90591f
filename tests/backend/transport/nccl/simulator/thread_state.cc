#include "tests/backend/transport/nccl/simulator/thread_state.h"

namespace farandole::testing {

ThreadState& ThreadState::of(const Core& core) {
  thread_local ThreadState state;
  if (state.serial != core.serial) {
    state = ThreadState();
    state.serial = core.serial;
  }
  return state;
}

}  // namespace farandole::testing
