#include "backend/collective/reduction.h"

namespace farandole::collective {

void Combiner::combine(Program& program, void* dst, std::span<const void* const> sources, std::span<const int> ranks,
                       std::size_t bytes) const {
  if (sources.size() == 1) return program.copy(dst, sources[0], bytes);
  const std::size_t count = bytes / reduction_.elementSize;
  if (reduction_.average != nullptr) return program.average(reduction_.average, dst, sources, ranks, count);
  const ReduceFunction function = reduction_.partial != nullptr ? reduction_.partial : reduction_.function;
  program.reduce(function, dst, sources, count);
}

void Combiner::combineLast(Program& program, void* dst, std::span<const void* const> sources,
                           std::span<const int> ranks, std::size_t bytes) const {
  if (static_cast<int>(sources.size()) == parts_) {
    return program.reduce(reduction_.function, dst, sources, bytes / reduction_.elementSize);
  }
  combine(program, dst, sources, ranks, bytes);
  finish(program, dst, bytes);
}

void Combiner::finish(Program& program, void* data, std::size_t bytes) const {
  if (reduction_.finish == nullptr) return;
  program.finish(reduction_.finish, data, parts_, bytes / reduction_.elementSize);
}

}  // namespace farandole::collective
