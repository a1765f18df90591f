#pragma once

#include <ATen/ATen.h>

#include <span>
#include <vector>

#include "backend/collective/algorithms.h"

namespace farandole::backend {

// Each throws an error that names the operation, the argument, its value and
// what was expected.

// A dense, contiguous tensor on cpu or cuda.
void checkTensor(const char* operation, const char* argument, const at::Tensor& tensor);
// As above, or with its dimensions in another order, as channels-last: what a
// collective handles in the order of its memory, on all ranks alike.
void checkDense(const char* operation, const char* argument, const at::Tensor& tensor);
// A list of exactly one contiguous tensor; returns it.
at::Tensor& checkSingle(const char* operation, const char* argument, std::vector<at::Tensor>& tensors);
// A list of exactly one tensor as checkDense wants it; returns it.
at::Tensor& checkSingleDense(const char* operation, const char* argument, std::vector<at::Tensor>& tensors);
// What is only read may have gaps or overlaps in memory: then its values in a tensor of their own, else the tensor
// itself. Anything else that is wrong with it is left to the checks.
at::Tensor withoutGaps(const at::Tensor& tensor);
std::vector<at::Tensor> withoutGaps(const std::vector<at::Tensor>& tensors);
// The same where its dimensions must be in order, too.
at::Tensor inOrder(const at::Tensor& tensor);
std::vector<at::Tensor> inOrder(const std::vector<at::Tensor>& tensors);
// Of lists: in order on the CPU, where tensors of one list, or of one rank, may have another order than those beside
// them; on CUDA without gaps.
std::vector<at::Tensor> asListed(const std::vector<at::Tensor>& tensors);
// Whether its memory holds its values in the order of `like`: both contiguous, or with the same strides.
bool hasOrderOf(const at::Tensor& tensor, const at::Tensor& like);
// Tensors of the dtype of `like`, `count` of them: all contiguous, or all with the strides of `like`.
void checkList(const char* operation, const char* argument, const std::vector<at::Tensor>& tensors, std::size_t count,
               const at::Tensor& like);
// What a rank gives itself is copied, with nobody else to compare the sizes.
void checkOwn(const char* operation, const char* given, std::int64_t numGiven, const char* into, std::int64_t numInto);
void checkRank(const char* operation, const char* argument, std::int64_t rank, int size);
// One flat tensor that holds `size` times what `part` holds.
void checkFlat(const char* operation, const char* argument, const at::Tensor& flat, const at::Tensor& part, int size);
// As many flat tensors as parts, each contiguous and as checkFlat wants it.
void checkFlats(const char* operation, const char* argument, const std::vector<at::Tensor>& flats,
                const char* partArgument, const std::vector<at::Tensor>& parts, int size);

collective::Slice sliceOf(const at::Tensor& tensor);
std::vector<collective::Slice> slicesOf(const std::vector<at::Tensor>& tensors);
// `flat` cut in `size` equal parts.
std::vector<collective::Slice> equalSlices(const at::Tensor& flat, int size);
// `flat` cut along dimension 0; empty `splits` mean equal parts.
std::vector<collective::Slice> splitSlices(const char* operation, const char* argument, const at::Tensor& flat,
                                           const std::vector<std::int64_t>& splits, int size);

}  // namespace farandole::backend
