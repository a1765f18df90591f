#include "ddp/tensor_exchange.h"

#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

#include "ddp/abandonment.h"

namespace farandole::ddp {

namespace {

at::Tensor emptyFor(const at::Tensor& sent, const std::vector<int64_t>& splits) {
  std::vector<int64_t> sizes = sent.sizes().vec();
  sizes[0] = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  return at::empty(sizes, sent.options());
}

}  // namespace

TensorExchange::TensorExchange(Group group, const std::vector<at::Tensor>& sent, const Splits& sentSplits,
                               const Splits& receivedSplits)
    : group_(std::move(group)) {
  TORCH_CHECK(sent.size() == sentSplits.size() && sent.size() == receivedSplits.size(), sent.size(), " tensors with ",
              sentSplits.size(), " lists of splits that are sent and ", receivedSplits.size(),
              " that come: expected one of each for each tensor");
  for (std::size_t i = 0; i < sent.size(); ++i) {
    TORCH_CHECK(sent[i].dim() > 0, "tensor ", i, " has no dimension: expected at least one");
    at::Tensor tensor = sent[i];
    received_.push_back(emptyFor(tensor, receivedSplits[i]));
    works_.push_back(allToAll(*group_, received_.back(), tensor, receivedSplits[i], sentSplits[i]));
  }
}

const std::vector<at::Tensor>& TensorExchange::wait() {
  for (; ended_ < works_.size(); ++ended_) await(*group_, received_[ended_].device().type(), *works_[ended_]);
  return received_;
}

}  // namespace farandole::ddp
