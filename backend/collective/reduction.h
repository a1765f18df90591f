#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/collective/program.h"
#include "backend/collective/slice.h"

namespace farandole::collective {

struct Reduction {
  // The result of all parts, which meet in one call.
  ReduceFunction function;
  std::size_t elementSize;  // bytes
  std::uint16_t code = 0;   // dtype and operation, for ranks to compare
  // The result of some parts, to be combined further; null where that is `function`.
  ReduceFunction partial = nullptr;
  // For what partial() leaves to the end (the division of an average), from the one
  // source that has all parts combined; numSources is how many they are. May be null.
  ReduceFunction finish = nullptr;
  // Of an average whose partial results are averages themselves, so that none is beyond the data's range, instead of
  // both others: of how many ranks each source is counts. May be null.
  AverageFunction average = nullptr;
};

// A reduction in several steps, which different ranks may take. Partial results
// have the dtype of the data: where `function` accumulates in a wider one, as for
// half and bfloat16, they are rounded each time. Those of an average are averages
// then.
class Combiner {
 public:
  // `parts`: of how many the result is, counting each rank of the group.
  Combiner(const Reduction& reduction, int parts) : reduction_(reduction), parts_(parts) {}

  std::size_t elementSize() const { return reduction_.elementSize; }
  // Some of them; more are to come. `ranks`: of how many each source is.
  void combine(Program& program, void* dst, std::span<const void* const> sources, std::span<const int> ranks,
               std::size_t bytes) const;
  // The last of them.
  void combineLast(Program& program, void* dst, std::span<const void* const> sources, std::span<const int> ranks,
                   std::size_t bytes) const;
  // What combineLast() does, for data in which all are combined.
  void finish(Program& program, void* data, std::size_t bytes) const;

 private:
  const Reduction& reduction_;
  const int parts_;
};

}  // namespace farandole::collective
