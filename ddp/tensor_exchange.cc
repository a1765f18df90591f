#include "ddp/tensor_exchange.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <utility>

#include "ddp/abandonment.h"

namespace farandole::ddp {

namespace {

int64_t rowsOf(const std::vector<int64_t>& splits, int ranks, std::size_t tensor) {
  TORCH_CHECK(static_cast<int>(splits.size()) == ranks, "tensor ", tensor, " has ", splits.size(),
              " splits: expected one for each of ", ranks, " ranks");
  TORCH_CHECK(std::all_of(splits.begin(), splits.end(), [](int64_t split) { return split >= 0; }), "tensor ", tensor,
              " has splits ", splits, ": expected none below 0");
  return std::accumulate(splits.begin(), splits.end(), int64_t{0});
}

int64_t sumOf(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

}  // namespace

TensorExchange::TensorExchange(Group group, std::shared_ptr<StagingMemory> memory, const std::vector<at::Tensor>& sent,
                               Splits sentSplits)
    : group_(std::move(group)), memory_(std::move(memory)), sentSplits_(std::move(sentSplits)) {
  TORCH_CHECK(sent.size() == sentSplits_.size(), sent.size(), " tensors with ", sentSplits_.size(),
              " lists of splits that are sent: expected one for each tensor");
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const at::Tensor& tensor = sent[i];
    TORCH_CHECK(tensor.is_cpu(), "tensor ", i, " is on ", tensor.device(), ": expected one on the CPU");
    TORCH_CHECK(tensor.dim() > 0 && tensor.is_contiguous(), "tensor ", i, " has sizes ", tensor.sizes(),
                " and strides ", tensor.strides(), ": expected a contiguous one of one dimension or more");
    const int64_t rows = rowsOf(sentSplits_[i], group_->getSize(), i);
    TORCH_CHECK(rows == tensor.size(0), "tensor ", i, " has ", tensor.size(0), " rows, and splits ", sentSplits_[i],
                ": expected these to sum to its rows");
    const auto bytes = static_cast<std::size_t>(tensor.element_size());
    Form& form = forms_.emplace_back(Form{tensor.sizes().vec(), tensor.options(), bytes});
    for (const int64_t size : tensor.sizes().slice(1)) form.bytesOfRow *= static_cast<std::size_t>(size);
  }
  pack(sent);
}

std::vector<int64_t> TensorExchange::bytesByRank(const Splits& splits) const {
  std::vector<int64_t> bytes(group_->getSize());
  for (std::size_t i = 0; i < forms_.size(); ++i) {
    for (std::size_t rank = 0; rank < bytes.size(); ++rank) {
      bytes[rank] += splits[i][rank] * static_cast<int64_t>(forms_[i].bytesOfRow);
    }
  }
  bytes[group_->getRank()] = 0;
  return bytes;
}

template <typename Part>
void TensorExchange::forEachPart(const std::vector<at::Tensor>& tensors, const Splits& splits, Part part) const {
  std::vector<std::byte*> places;
  for (const at::Tensor& tensor : tensors) places.push_back(static_cast<std::byte*>(tensor.data_ptr()));
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::size_t bytes = static_cast<std::size_t>(splits[i][rank]) * forms_[i].bytesOfRow;
      if (bytes != 0) part(rank, places[i], bytes);
      places[i] += bytes;
    }
  }
}

void TensorExchange::pack(const std::vector<at::Tensor>& sent) {
  bytesToOthers_ = sumOf(bytesByRank(sentSplits_));
  int64_t bytes = bytesToOthers_;
  const int own = group_->getRank();
  for (std::size_t i = 0; i < forms_.size(); ++i) {
    bytes += sentSplits_[i][own] * static_cast<int64_t>(forms_[i].bytesOfRow);
  }
  outgoing_ = memory_->take(bytes);
  auto* nextOfOthers = static_cast<std::byte*>(outgoing_.data_ptr());
  std::byte* nextOfOwn = nextOfOthers + bytesToOthers_;
  forEachPart(sent, sentSplits_, [&](int rank, const std::byte* part, std::size_t size) {
    std::byte*& next = rank == own ? nextOfOwn : nextOfOthers;
    std::memcpy(next, part, size);
    next += size;
  });
}

void TensorExchange::expect(Splits receivedSplits) {
  TORCH_CHECK(!work_, "expect() of an exchange that has started");
  TORCH_CHECK(forms_.size() == receivedSplits.size(), forms_.size(), " tensors with ", receivedSplits.size(),
              " lists of splits that come: expected one for each tensor");
  const int own = group_->getRank();
  for (std::size_t i = 0; i < forms_.size(); ++i) {
    forms_[i].sizes[0] = rowsOf(receivedSplits[i], group_->getSize(), i);
    TORCH_CHECK(sentSplits_[i][own] == receivedSplits[i][own], "tensor ", i, " has splits ", sentSplits_[i],
                " that are sent and ", receivedSplits[i], " that come: expected the same at ", own,
                ", for what stays on this rank");
  }
  receivedSplits_ = std::move(receivedSplits);
}

void TensorExchange::start() {
  TORCH_CHECK(!work_, "start() of an exchange that has started");
  TORCH_CHECK(receivedSplits_.size() == forms_.size(), "start() of an exchange before expect()");
  std::vector<int64_t> by = bytesByRank(receivedSplits_);
  incoming_ = memory_->take(sumOf(by));
  at::Tensor toOthers = outgoing_.narrow(0, 0, bytesToOthers_);
  work_ = allToAll(*group_, incoming_, toOthers, std::move(by), bytesByRank(sentSplits_));
}

const std::vector<at::Tensor>& TensorExchange::wait() {
  TORCH_CHECK(work_, "wait() for an exchange that has not started");
  if (!hasEnded_) {
    await(*group_, at::kCPU, *work_);
    hasEnded_ = true;
    unpack();
  }
  return received_;
}

void TensorExchange::unpack() {
  for (const Form& form : forms_) received_.push_back(at::empty(form.sizes, form.options));
  const auto* nextOfOthers = static_cast<const std::byte*>(incoming_.data_ptr());
  const std::byte* nextOfOwn = static_cast<const std::byte*>(outgoing_.data_ptr()) + bytesToOthers_;
  forEachPart(received_, receivedSplits_, [&](int rank, std::byte* part, std::size_t bytes) {
    const std::byte*& next = rank == group_->getRank() ? nextOfOwn : nextOfOthers;
    std::memcpy(part, next, bytes);
    next += bytes;
  });
  outgoing_.reset();
  incoming_.reset();
}

}  // namespace farandole::ddp
