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

at::Tensor bytesOf(const std::vector<int64_t>& byRank) {
  return at::empty(std::accumulate(byRank.begin(), byRank.end(), int64_t{0}), at::kByte);
}

}  // namespace

TensorExchange::TensorExchange(Group group, std::vector<at::Tensor> sent, Splits sentSplits, Splits receivedSplits)
    : group_(std::move(group)),
      sent_(std::move(sent)),
      sentSplits_(std::move(sentSplits)),
      receivedSplits_(std::move(receivedSplits)) {
  TORCH_CHECK(sent_.size() == sentSplits_.size() && sent_.size() == receivedSplits_.size(), sent_.size(),
              " tensors with ", sentSplits_.size(), " lists of splits that are sent and ", receivedSplits_.size(),
              " that come: expected one of each for each tensor");
  const int ranks = group_->getSize(), own = group_->getRank();
  for (std::size_t i = 0; i < sent_.size(); ++i) {
    const at::Tensor& tensor = sent_[i];
    TORCH_CHECK(tensor.is_cpu(), "tensor ", i, " is on ", tensor.device(), ": expected one on the CPU");
    TORCH_CHECK(tensor.dim() > 0 && tensor.is_contiguous(), "tensor ", i, " has sizes ", tensor.sizes(),
                " and strides ", tensor.strides(), ": expected a contiguous one of one dimension or more");
    const int64_t rows = rowsOf(sentSplits_[i], ranks, i);
    TORCH_CHECK(rows == tensor.size(0), "tensor ", i, " has ", tensor.size(0), " rows, and splits ", sentSplits_[i],
                ": expected these to sum to its rows");
    const int64_t comes = rowsOf(receivedSplits_[i], ranks, i);
    TORCH_CHECK(sentSplits_[i][own] == receivedSplits_[i][own], "tensor ", i, " has splits ", sentSplits_[i],
                " that are sent and ", receivedSplits_[i], " that come: expected the same at ", own,
                ", for what stays on this rank");
    const at::IntArrayRef inner = tensor.sizes().slice(1);
    const auto bytes = static_cast<std::size_t>(tensor.element_size());
    Form& form = forms_.emplace_back(Form{tensor.sizes().vec(), tensor.options(), bytes});
    form.sizes[0] = comes;
    for (const int64_t size : inner) form.bytesOfRow *= static_cast<std::size_t>(size);
  }
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
      if (bytes != 0) part(rank, i, places[i], bytes);
      places[i] += bytes;
    }
  }
}

void TensorExchange::start() {
  TORCH_CHECK(!work_, "start() of an exchange that has started");
  std::vector<int64_t> to = bytesByRank(sentSplits_);
  std::vector<int64_t> by = bytesByRank(receivedSplits_);
  outgoing_ = bytesOf(to);
  incoming_ = bytesOf(by);
  auto* next = static_cast<std::byte*>(outgoing_.data_ptr());
  const int own = group_->getRank();
  kept_.resize(sent_.size());
  forEachPart(sent_, sentSplits_, [&](int rank, std::size_t i, const std::byte* part, std::size_t bytes) {
    if (rank == own) {
      kept_[i] = part;
      return;
    }
    std::memcpy(next, part, bytes);
    next += bytes;
  });
  work_ = allToAll(*group_, incoming_, outgoing_, std::move(by), std::move(to));
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
  const auto* next = static_cast<const std::byte*>(incoming_.data_ptr());
  const int own = group_->getRank();
  forEachPart(received_, receivedSplits_, [&](int rank, std::size_t i, std::byte* part, std::size_t bytes) {
    if (rank == own) {
      std::memcpy(part, kept_[i], bytes);
      return;
    }
    std::memcpy(part, next, bytes);
    next += bytes;
  });
  sent_.clear();
  outgoing_.reset();
  incoming_.reset();
}

}  // namespace farandole::ddp
