#include "backend/c10d/memory_apart.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

namespace farandole::backend {
namespace {

// From the first byte of any of them to the last.
Slice spanOf(std::span<const Slice> slices) {
  Slice span{nullptr, 0};
  for (const Slice& slice : slices) {
    if (slice.bytes == 0) continue;
    if (span.bytes == 0) span = slice;
    std::byte* const end = std::max(span.data + span.bytes, slice.data + slice.bytes);
    span.data = std::min(span.data, slice.data);
    span.bytes = static_cast<std::size_t>(end - span.data);
  }
  return span;
}

bool areApart(std::span<const Slice> outputs, std::span<const Slice> parts, int rank) {
  if (!overlap(spanOf(outputs), spanOf(parts))) return true;
  const auto isOwn = [&](std::span<const Slice> slices, std::size_t i) {
    return slices.size() == 1 || static_cast<int>(i) == rank;
  };
  for (std::size_t from = 0; from < outputs.size(); ++from) {
    for (std::size_t to = 0; to < parts.size(); ++to) {
      const bool isInPlace = isOwn(outputs, from) && isOwn(parts, to) && outputs[from].data == parts[to].data;
      if (!isInPlace && overlap(outputs[from], parts[to])) return false;
    }
  }
  return true;
}

at::Tensor copied(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  return tensor.clone();
}

std::byte* dataOf(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

void copy(at::Tensor& input, std::span<Slice> parts) {
  std::byte* const before = dataOf(input);
  input = copied(input);
  for (Slice& part : parts) part.data = dataOf(input) + (part.data - before);
}

}  // namespace

bool overlap(const Slice& a, const Slice& b) {
  return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
}

bool anyOverlap(std::span<const Slice> slices) {
  if (slices.size() == 2) return overlap(slices[0], slices[1]);
  std::vector<Slice> sorted(slices.begin(), slices.end());
  std::erase_if(sorted, [](const Slice& slice) { return slice.bytes == 0; });
  std::sort(sorted.begin(), sorted.end(), [](const Slice& a, const Slice& b) { return a.data < b.data; });
  return std::adjacent_find(sorted.begin(), sorted.end(), overlap) != sorted.end();
}

void readApart(at::Tensor& input, std::vector<Slice>& parts, std::span<const Slice> outputs, int rank) {
  if (!areApart(outputs, parts, rank)) copy(input, parts);
}

void readApart(std::vector<at::Tensor>& inputs, std::vector<Slice>& parts, std::span<const Slice> outputs, int rank) {
  if (areApart(outputs, parts, rank)) return;
  for (std::size_t i = 0; i < inputs.size(); ++i) copy(inputs[i], {&parts[i], 1});
}

void readAllApart(std::vector<at::Tensor>& inputs, std::vector<Apart>& each, int rank) {
  std::vector<Slice> outputs;
  outputs.reserve(each.size());
  for (const Apart& one : each) outputs.push_back(spanOf(one.outputs));
  const Slice whole = spanOf(outputs);
  for (std::size_t i = 0; i < each.size(); ++i) {
    const Slice input = spanOf(each[i].parts);
    if (!overlap(whole, input)) continue;
    bool isApart = areApart(each[i].outputs, each[i].parts, rank);
    for (std::size_t j = 0; isApart && j < each.size(); ++j) {
      isApart = j == i || std::none_of(each[j].outputs.begin(), each[j].outputs.end(),
                                       [&](const Slice& output) { return overlap(output, input); });
    }
    if (!isApart) copy(inputs[i], each[i].parts);
  }
}

}  // namespace farandole::backend
