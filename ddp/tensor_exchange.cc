#include "ddp/tensor_exchange.h"

#include <c10/util/Exception.h>

#include <algorithm>
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

}  // namespace

TensorExchange::TensorExchange(Group group, std::vector<at::Tensor> sent, Splits sentSplits, Splits receivedSplits)
    : group_(std::move(group)),
      sent_(std::move(sent)),
      sentSplits_(std::move(sentSplits)),
      receivedSplits_(std::move(receivedSplits)) {
  TORCH_CHECK(sent_.size() == sentSplits_.size() && sent_.size() == receivedSplits_.size(), sent_.size(),
              " tensors with ", sentSplits_.size(), " lists of splits that are sent and ", receivedSplits_.size(),
              " that come: expected one of each for each tensor");
  const int ranks = group_->getSize();
  for (std::size_t i = 0; i < sent_.size(); ++i) {
    const at::Tensor& tensor = sent_[i];
    TORCH_CHECK(tensor.dim() > 0 && tensor.is_contiguous(), "tensor ", i, " has sizes ", tensor.sizes(),
                " and strides ", tensor.strides(), ": expected a contiguous one of one dimension or more");
    const int64_t rows = rowsOf(sentSplits_[i], ranks, i);
    TORCH_CHECK(rows == tensor.size(0), "tensor ", i, " has ", tensor.size(0), " rows, and splits ", sentSplits_[i],
                ": expected these to sum to its rows");
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes[0] = rowsOf(receivedSplits_[i], ranks, i);
    received_.push_back(at::empty(sizes, tensor.options()));
  }
}

void TensorExchange::start() {
  TORCH_CHECK(works_.empty(), "start() of an exchange that has started");
  for (std::size_t i = 0; i < sent_.size(); ++i) {
    works_.push_back(allToAll(*group_, received_[i], sent_[i], receivedSplits_[i], sentSplits_[i]));
  }
}

const std::vector<at::Tensor>& TensorExchange::wait() {
  TORCH_CHECK(works_.size() == sent_.size(), "wait() for an exchange that has not started");
  for (; ended_ < works_.size(); ++ended_) await(*group_, received_[ended_].device().type(), *works_[ended_]);
  return received_;
}

}  // namespace farandole::ddp
