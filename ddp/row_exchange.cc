#include "ddp/row_exchange.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "ddp/abandonment.h"

namespace farandole::ddp {

RowExchange::RowExchange(Group group, c10::Device device) : group_(std::move(group)), device_(device) {}

void RowExchange::start(const std::vector<int64_t>& rows) {
  TORCH_CHECK(!work_, "start() of rows before finish() of those under way");
  TORCH_CHECK(rows.size() % static_cast<size_t>(group_->getSize()) == 0, "rows have ", rows.size(),
              " integers: expected equally many for each of ", group_->getSize(), " ranks");
  Tensors tensors = std::exchange(tensors_, {});  // what fails may still be under way with them
  const auto count = static_cast<int64_t>(rows.size());
  if (!tensors.rows.defined() || tensors.rows.numel() != count) {
    tensors.rows = at::empty({count}, at::kLong);
    tensors.received = at::empty({count}, at::TensorOptions(at::kLong).device(device_));
  }
  std::copy(rows.begin(), rows.end(), tensors.rows.mutable_data_ptr<int64_t>());
  tensors.sent = tensors.rows.to(device_);
  work_ = allToAll(*group_, tensors.received, tensors.sent);
  tensors_ = std::move(tensors);
}

bool RowExchange::hasCome() const { return !work_ || work_->isCompleted(); }

std::vector<int64_t> RowExchange::finish() {
  TORCH_CHECK(work_, "finish() of rows that were not started");
  const WorkPtr work = std::exchange(work_, nullptr);
  Tensors tensors = std::exchange(tensors_, {});
  await(*group_, device_.type(), *work);
  tensors_ = std::move(tensors);
  const at::Tensor received = tensors_.received.cpu();
  const auto* first = received.const_data_ptr<int64_t>();
  return {first, first + received.numel()};
}

}  // namespace farandole::ddp
