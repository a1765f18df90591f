#pragma once

namespace farandole::pipeline::sparse {

// Lets glibc's malloc keep up to 62 MiB that the process frees. Gradients of some megabytes went back to the system and
// were faulted in again, in each step or in none, by what lay behind them in the heap. Where the environment sets
// malloc's thresholds it does nothing, nor from the second time on.
void keepFreedMemory();

}  // namespace farandole::pipeline::sparse
