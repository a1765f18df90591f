#include "backend/collective/reduction.h"

namespace farandole::collective {

void Combiner::combine(Program& program, void* dst, std::span<const void* const> sources, std::size_t bytes) const {
  if (sources.size() == 1) return program.copy(dst, sources[0], bytes);
  const ReduceFunction function = reduction_.partial != nullptr ? reduction_.partial : reduction_.function;
  program.reduce(function, dst, sources, bytes / reduction_.elementSize);
}

void Combiner::combineLast(Program& program, void* dst, std::span<const void* const> sources, std::size_t bytes) const {
  if (static_cast<int>(sources.size()) == parts_) {
    return program.reduce(reduction_.function, dst, sources, bytes / reduction_.elementSize);
  }
  combine(program, dst, sources, bytes);
  finish(program, dst, bytes);
}

void Combiner::finish(Program& program, void* data, std::size_t bytes) const {
  if (reduction_.finish == nullptr) return;
  program.finish(reduction_.finish, data, parts_, bytes / reduction_.elementSize);
}

}  // namespace farandole::collective
