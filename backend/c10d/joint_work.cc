#include "backend/c10d/joint_work.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/c10d/timeouts.h"
#include "backend/common/deadline.h"

namespace farandole::backend {
namespace {

using std::chrono::milliseconds;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

c10::List<FuturePtr> futuresOf(const std::vector<c10::intrusive_ptr<::c10d::Work>>& works, const c10::TypePtr& type,
                               FuturePtr (::c10d::Work::*get)()) {
  c10::List<FuturePtr> futures(c10::FutureType::create(type));
  for (const auto& work : works) futures.push_back((*work.*get)());
  return futures;
}

}  // namespace

WaitLimit::WaitLimit(milliseconds timeout)
    : timeout_(timeout), isOwn_(isUnset(timeout)), deadline_(deadlineIn(isOwn_ ? milliseconds(0) : timeout)) {
  checkOwnTimeout("wait", timeout);
}

milliseconds WaitLimit::left() const {
  if (isOwn_) return timeout_;
  const auto rest = std::chrono::ceil<milliseconds>(deadline_ - std::chrono::steady_clock::now());
  return std::max(rest, milliseconds(1));
}

bool JointWork::isCompleted() {
  return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
}

bool JointWork::isSuccess() const {
  return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr JointWork::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

std::vector<at::Tensor> JointWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
  }
  return all;
}

bool JointWork::wait(milliseconds timeout) {
  const WaitLimit limit(timeout);
  // All are waited for, also after a failure: the buffers are the caller's again when this returns.
  std::exception_ptr first;
  for (const auto& work : works_) {
    try {
      work->wait(limit.left());
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
  return true;
}

void JointWork::abort() {
  for (const auto& work : works_) work->abort();
}

FuturePtr JointWork::getFuture() {
  const auto tensors = c10::ListType::create(c10::TensorType::get());
  return c10::collectAll(futuresOf(works_, tensors, &Work::getFuture))
      ->then(
          [self = c10::intrusive_ptr<JointWork>::reclaim_copy(this)](c10::ivalue::Future& all) -> c10::IValue {
            if (all.hasError()) std::rethrow_exception(all.exception_ptr());
            if (auto error = self->exception()) std::rethrow_exception(error);
            return self->result();
          },
          tensors);
}

FuturePtr JointWork::getFutureResult() {
  const auto futures = futuresOf(works_, c10::IntType::get(), &Work::getFutureResult);
  return c10::collectAll(futures)->then(
      [futures](c10::ivalue::Future&) -> c10::IValue {
        constexpr auto kSuccess = static_cast<std::int64_t>(::c10d::WorkResult::SUCCESS);
        for (const FuturePtr& future : futures) {
          if (const std::int64_t result = future->value().toInt(); result != kSuccess) return result;
        }
        return kSuccess;
      },
      c10::IntType::get());
}

float JointWork::getDuration() const {
  float longest = 0;
  for (const auto& work : works_) longest = std::max(longest, work->getDuration());
  return longest;
}

std::uint64_t JointWork::getSequencenumber() const {
  TORCH_CHECK(!works_.empty(), "farandole: a batch of no operations has no sequence number");
  return works_[0]->getSequencenumber();
}

milliseconds JointWork::getTimeout() const {
  milliseconds longest = kNoTimeout;
  for (const auto& work : works_) longest = std::max(longest, timeoutOf(*work));
  return longest;
}

}  // namespace farandole::backend
