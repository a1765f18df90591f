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
  at::Tensor sent = at::empty({static_cast<int64_t>(rows.size())}, at::kLong);
  std::copy(rows.begin(), rows.end(), sent.mutable_data_ptr<int64_t>());
  sent_ = sent.to(device_);
  received_ = at::empty_like(sent_);
  work_ = allToAll(*group_, received_, sent_);
}

bool RowExchange::hasCome() const { return !work_ || work_->isCompleted(); }

std::vector<int64_t> RowExchange::finish() {
  TORCH_CHECK(work_, "finish() of rows that were not started");
  const WorkPtr work = std::exchange(work_, nullptr);
  await(*group_, device_.type(), *work);
  const at::Tensor received = received_.cpu();
  const auto* first = received.const_data_ptr<int64_t>();
  return {first, first + received.numel()};
}

}  // namespace farandole::ddp
