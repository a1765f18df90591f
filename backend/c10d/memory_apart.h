#pragma once

#include <ATen/ATen.h>

#include <span>
#include <vector>

#include "backend/collective/algorithms.h"

namespace farandole::backend {

using collective::Slice;

bool overlap(const Slice& a, const Slice& b);
// Whether any two of them do.
bool anyOverlap(std::span<const Slice> slices);

// What a collective reads while it writes its outputs lies apart from these, but for what this rank gives itself and
// leaves where it is. Which ranks that concerns depends on the rank, so nothing is refused: a copy is read instead.
// `outputs` and `parts`: one for each rank, or one for all. `parts` is what of `input` each rank is given.
void readApart(at::Tensor& input, std::vector<Slice>& parts, std::span<const Slice> outputs, int rank);
// `parts` are the inputs.
void readApart(std::vector<at::Tensor>& inputs, std::vector<Slice>& parts, std::span<const Slice> outputs, int rank);

// The same for several at once, by input, each of which is also read apart from the others' outputs.
struct Apart {
  std::vector<Slice> outputs;
  std::vector<Slice> parts;
};
void readAllApart(std::vector<at::Tensor>& inputs, std::vector<Apart>& each, int rank);

}  // namespace farandole::backend
