#include "backend/c10d/tensor_checks.h"

#include <algorithm>
#include <numeric>
#include <string>

namespace farandole::backend {

using collective::Slice;

namespace {

void checkStrided(const char* operation, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), operation, ": ", argument, " is undefined; expected a tensor");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, operation, ": ", argument, " has layout ", tensor.layout(),
                    "; expected a dense (strided) tensor");
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || tensor.device().is_cuda(), operation, ": ", argument, " is on device ",
                    tensor.device(), "; expected cpu or cuda");
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), operation, ": ", argument, " is a lazily ",
                    tensor.is_conj() ? "conjugated" : "negated", " view; expected its values, pass ",
                    tensor.is_conj() ? ".resolve_conj()" : ".resolve_neg()");
  // c10d's own calls take such tensors apart; a backend that is called by itself meets them.
  TORCH_CHECK_VALUE(tensor.numel() == 0 || tensor.const_data_ptr() != nullptr, operation, ": ", argument, " of shape ",
                    tensor.sizes(),
                    " has no memory (its storage is empty, or it stands for another tensor, as a DTensor does); "
                    "expected a tensor with memory of its own");
}

// One call is on one device.
void checkDevice(const char* operation, const char* argument, const at::Tensor& tensor, const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), operation, ": ", argument, " is on device ", tensor.device(),
                    "; expected ", like.device(), " as the other argument");
}

at::Tensor& single(const char* operation, const char* argument, std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, operation, ": ", argument, " has ", tensors.size(), " tensors; expected one");
  return tensors[0];
}

at::Tensor contiguousCopy(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  return tensor.contiguous();
}

template <typename Function>
std::vector<at::Tensor> each(const std::vector<at::Tensor>& tensors, Function function) {
  std::vector<at::Tensor> results;
  results.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) results.push_back(function(tensor));
  return results;
}

}  // namespace

at::Tensor withoutGaps(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_non_overlapping_and_dense()) return tensor;
  return contiguousCopy(tensor);
}

std::vector<at::Tensor> withoutGaps(const std::vector<at::Tensor>& tensors) {
  return each(tensors, [](const at::Tensor& tensor) { return withoutGaps(tensor); });
}

at::Tensor inOrder(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_contiguous()) return tensor;
  return contiguousCopy(tensor);
}

std::vector<at::Tensor> inOrder(const std::vector<at::Tensor>& tensors) {
  return each(tensors, [](const at::Tensor& tensor) { return inOrder(tensor); });
}

std::vector<at::Tensor> asListed(const std::vector<at::Tensor>& tensors) {
  return each(tensors, [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_cpu() ? inOrder(tensor) : withoutGaps(tensor);
  });
}

void checkTensor(const char* operation, const char* argument, const at::Tensor& tensor) {
  checkStrided(operation, argument, tensor);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), operation, ": ", argument, " of shape ", tensor.sizes(), " has strides ",
                    tensor.strides(), "; expected a contiguous tensor, pass .contiguous()");
}

void checkDense(const char* operation, const char* argument, const at::Tensor& tensor) {
  checkStrided(operation, argument, tensor);
  TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), operation, ": ", argument, " of shape ", tensor.sizes(),
                    " has strides ", tensor.strides(),
                    "; expected a tensor with neither gaps nor overlaps in memory, pass .contiguous()");
}

at::Tensor& checkSingle(const char* operation, const char* argument, std::vector<at::Tensor>& tensors) {
  checkTensor(operation, argument, single(operation, argument, tensors));
  return tensors[0];
}

at::Tensor& checkSingleDense(const char* operation, const char* argument, std::vector<at::Tensor>& tensors) {
  checkDense(operation, argument, single(operation, argument, tensors));
  return tensors[0];
}

bool hasOrderOf(const at::Tensor& tensor, const at::Tensor& like) {
  return (tensor.is_contiguous() && like.is_contiguous()) || tensor.strides() == like.strides();
}

void checkList(const char* operation, const char* argument, const std::vector<at::Tensor>& tensors, std::size_t count,
               const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensors.size() == count, operation, ": ", argument, " has ", tensors.size(), " tensors; expected ",
                    count, ", one for each rank");
  for (const at::Tensor& tensor : tensors) {
    checkDense(operation, argument, tensor);
    checkDevice(operation, argument, tensor, like);
    TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), operation, ": ", argument, " has a tensor of dtype ",
                     tensor.scalar_type(), "; expected ", like.scalar_type(), " as the other argument");
    TORCH_CHECK_VALUE(hasOrderOf(tensor, like), operation, ": ", argument, " has a tensor of strides ",
                      tensor.strides(), "; expected ", like.strides(), " as the other argument, or contiguous tensors");
  }
}

void checkOwn(const char* operation, const char* given, std::int64_t numGiven, const char* into, std::int64_t numInto) {
  TORCH_CHECK_VALUE(numGiven == numInto, operation, ": ", given, " has ", numGiven,
                    " elements for this rank itself; expected ", numInto, " as ", into);
}

void checkRank(const char* operation, const char* argument, std::int64_t rank, int size) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, operation, ": ", argument, " is ", rank, "; expected a rank from 0 to ",
                    size - 1);
}

void checkFlat(const char* operation, const char* argument, const at::Tensor& flat, const at::Tensor& part, int size) {
  checkDevice(operation, argument, flat, part);
  TORCH_CHECK_TYPE(flat.scalar_type() == part.scalar_type(), operation, ": ", argument, " has dtype ",
                   flat.scalar_type(), "; expected ", part.scalar_type(), " as the other argument");
  TORCH_CHECK_VALUE(flat.numel() == part.numel() * size, operation, ": ", argument, " has ", flat.numel(),
                    " elements; expected ", size, " ranks x ", part.numel());
}

void checkFlats(const char* operation, const char* argument, const std::vector<at::Tensor>& flats,
                const char* partArgument, const std::vector<at::Tensor>& parts, int size) {
  TORCH_CHECK_VALUE(!parts.empty(), operation, ": ", partArgument, " is empty; expected one tensor or more");
  TORCH_CHECK_VALUE(flats.size() == parts.size(), operation, ": ", argument, " has ", flats.size(),
                    " tensors; expected ", parts.size(), " as ", partArgument);
  for (std::size_t i = 0; i < flats.size(); ++i) {
    checkTensor(operation, partArgument, parts[i]);
    checkTensor(operation, argument, flats[i]);
    checkFlat(operation, argument, flats[i], parts[i], size);
  }
}

Slice sliceOf(const at::Tensor& tensor) { return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()}; }

std::vector<Slice> slicesOf(const std::vector<at::Tensor>& tensors) {
  std::vector<Slice> slices;
  slices.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) slices.push_back(sliceOf(tensor));
  return slices;
}

std::vector<Slice> equalSlices(const at::Tensor& flat, int size) {
  const Slice whole = sliceOf(flat);
  std::vector<Slice> slices(size);
  for (int i = 0; i < size; ++i) slices[i] = {whole.data + whole.bytes / size * i, whole.bytes / size};
  return slices;
}

std::vector<Slice> splitSlices(const char* operation, const char* argument, const at::Tensor& flat,
                               const std::vector<std::int64_t>& splits, int size) {
  const std::int64_t rows = flat.dim() == 0 ? flat.numel() : flat.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, operation, ": ", argument, " has ", rows, " rows; expected a multiple of the ",
                      size, " ranks, or split sizes");
    return equalSlices(flat, size);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<std::size_t>(size), operation, ": ", argument, " has ", splits.size(),
                    " split sizes; expected ", size, ", one for each rank");
  // Each by itself first: a sum of any numbers may wrap around to what is expected.
  for (const std::int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0 && split <= rows, operation, ": ", argument, " has split size ", split,
                      "; expected 0 to its ", rows, " rows");
  }
  const std::int64_t sum = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  TORCH_CHECK_VALUE(sum == rows, operation, ": the split sizes of ", argument, " sum to ", sum, "; expected its ", rows,
                    " rows");
  const Slice whole = sliceOf(flat);
  const std::size_t rowBytes = rows == 0 ? 0 : whole.bytes / rows;
  std::vector<Slice> slices;
  std::byte* at = whole.data;
  for (const std::int64_t split : splits) {
    slices.push_back({at, rowBytes * split});
    at += rowBytes * split;
  }
  return slices;
}

}  // namespace farandole::backend
