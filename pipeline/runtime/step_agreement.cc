#include "pipeline/runtime/step_agreement.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/common/text.h"

namespace farandole::pipeline {

namespace {

// A report on the wire: failed, time, length of the text, text (cut to fit).
constexpr std::int64_t kReportBytes = 4096;
constexpr std::int64_t kReportHeaderBytes = 3 * sizeof(std::int64_t);

at::Tensor encode(const FailureReport& report) {
  at::Tensor bytes = at::zeros({kReportBytes}, at::kByte);
  const std::string_view text = cutText(report.text, kReportBytes - kReportHeaderBytes);
  const std::int64_t header[3] = {report.failed, report.timeNs, static_cast<std::int64_t>(text.size())};
  std::memcpy(bytes.data_ptr(), header, sizeof(header));
  std::memcpy(bytes.data_ptr<std::uint8_t>() + sizeof(header), text.data(), text.size());
  return bytes;
}

FailureReport decode(const at::Tensor& bytes) {
  std::int64_t header[3];
  std::memcpy(header, bytes.data_ptr(), sizeof(header));
  const std::int64_t length = std::clamp<std::int64_t>(header[2], 0, kReportBytes - kReportHeaderBytes);
  const char* text = reinterpret_cast<const char*>(bytes.data_ptr<std::uint8_t>()) + sizeof(header);
  return {header[0] != 0, header[1], std::string(text, length)};
}

c10d::AllreduceOptions maximum() {
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  return options;
}

}  // namespace

StepAgreement::StepAgreement(c10::intrusive_ptr<c10d::Backend> backend, int worldSize)
    : backend_(std::move(backend)),
      worldSize_(worldSize),
      voteTensor_{at::zeros({4}, at::kLong)},
      failedTensor_{at::zeros({1}, at::kLong)} {}

void StepAgreement::postVote(const Vote& vote) {
  vote_ = vote;
  if (worldSize_ == 1) return;
  // max(x) == -max(-x) exactly when all ranks hold the same x.
  const std::int64_t digest = static_cast<std::int64_t>(vote.digest >> 2);
  std::int64_t* data = voteTensor_[0].data_ptr<std::int64_t>();
  data[0] = vote.refuse;
  data[1] = vote.relearn;
  data[2] = digest;
  data[3] = -digest;
  voteWork_ = backend_->allreduce(voteTensor_, maximum());
}

StepAgreement::Outcome StepAgreement::awaitVote(std::chrono::milliseconds patience) {
  if (worldSize_ == 1) return {vote_.refuse, vote_.relearn, true};
  voteWork_->wait(patience);
  voteWork_.reset();
  const std::int64_t* data = voteTensor_[0].data_ptr<std::int64_t>();
  return {data[0] != 0, data[1] != 0, data[2] == -data[3]};
}

bool StepAgreement::anyFailed(bool failed) {
  if (worldSize_ == 1) return failed;
  std::int64_t* data = failedTensor_[0].data_ptr<std::int64_t>();
  *data = failed;
  backend_->allreduce(failedTensor_, maximum())->wait();
  return *data != 0;
}

std::vector<FailureReport> StepAgreement::exchangeReports(const FailureReport& mine) {
  if (worldSize_ == 1) return {mine};
  std::vector<at::Tensor> inputs{encode(mine)};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < worldSize_; ++rank) outputs[0].push_back(at::zeros({kReportBytes}, at::kByte));
  backend_->allgather(outputs, inputs)->wait();
  std::vector<FailureReport> reports;
  for (const at::Tensor& bytes : outputs[0]) reports.push_back(decode(bytes));
  return reports;
}

void refuseStep(const c10::intrusive_ptr<c10d::Backend>& backend, const std::string& reason,
                std::chrono::milliseconds patience) {
  StepAgreement agreement(backend, backend->getSize());
  agreement.postVote({true, true, 0});
  agreement.awaitVote(patience);
  agreement.exchangeReports({true, systemTimeNs(), reason});
}

std::int64_t systemTimeNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string describeFailures(std::vector<FailureReport> reports) {
  std::erase_if(reports, [](const FailureReport& report) { return !report.failed; });
  std::stable_sort(reports.begin(), reports.end(),
                   [](const FailureReport& a, const FailureReport& b) { return a.timeNs < b.timeNs; });
  std::string text;
  for (std::size_t i = 0; i < reports.size(); ++i) {
    if (i > 0) text += "\n  after that: ";
    text += reports[i].text;
  }
  return text;
}

}  // namespace farandole::pipeline
