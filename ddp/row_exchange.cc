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
  // Not members on the way: what has failed may still be under way with them.
  at::Tensor sent = std::exchange(sent_, {}), received = std::exchange(received_, {});
  const auto count = static_cast<int64_t>(rows.size());
  if (!sent.defined() || sent.numel() != count) {
    sent = at::empty({count}, at::kLong);
    received = at::empty({count}, at::TensorOptions(at::kLong).device(device_));
  }
  std::copy(rows.begin(), rows.end(), sent.mutable_data_ptr<int64_t>());
  at::Tensor onDevice = sent.to(device_);
  work_ = allToAll(*group_, received, onDevice);
  sent_ = std::move(sent);
  received_ = std::move(received);
}

bool RowExchange::hasCome() const { return !work_ || work_->isCompleted(); }

std::vector<int64_t> RowExchange::finish() {
  TORCH_CHECK(work_, "finish() of rows that were not started");
  const WorkPtr work = std::exchange(work_, nullptr);
  at::Tensor sent = std::exchange(sent_, {}), received = std::exchange(received_, {});
  await(*group_, device_.type(), *work);
  const at::Tensor onHost = received.cpu();
  const auto* first = onHost.const_data_ptr<int64_t>();
  sent_ = std::move(sent);
  received_ = std::move(received);
  return {first, first + onHost.numel()};
}

}  // namespace farandole::ddp
