// A barrier that says who did not come. Rank 0 hears from everybody, and then
// tells everybody how it went.
#include "backend/c10d/process_group.h"
#include "backend/c10d/tensor_checks.h"

namespace farandole::backend {

using ::c10d::OpType;
using collective::Program;

namespace {

constexpr std::int32_t kAllCame = -1;

// In the words of c10d's own, which tools look for: "Rank 1 failed to pass monitoredBarrier".
std::string failureText(std::string missing, std::chrono::milliseconds timeout) {
  missing[0] = 'R';
  return missing + " failed to pass monitoredBarrier in " + std::to_string(timeout.count()) + " ms";
}

}  // namespace

c10::intrusive_ptr<CollectiveWork> ProcessGroupFarandole::startBarrierPart(const WorkOptions& options, Tensors kept,
                                                                           const BuildProgram& build) {
  auto work = c10::make_intrusive<CollectiveWork>(communicator_, options);
  work->setTensors({}, std::move(kept));
  collective::Program program;
  build(program);
  work->setProgram(std::move(program), static_cast<std::uint32_t>(options.sequence));
  work->endAlone();
  work->launch();
  return work;
}

void ProcessGroupFarandole::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool waitAllRanks) {
  WorkOptions options = workOptions(OpType::BARRIER, "farandole:monitored_barrier", opts.timeout);
  const WorkHooks::OnDone onDone = std::exchange(options.onDone, {});
  // Recorded as one operation: its parts are of nobody's interest.
  const GroupFlight* const flight = std::exchange(options.flight, nullptr);
  std::uint64_t entry = 0;
  if (flight != nullptr) {
    entry = flight->recorder().reserve(1);
    flight->recorder().write(entry, flight->record(options.title, options.timeout, options.sequence, false),
                             observe::FlightState::kStarted);
  }
  const auto started = std::chrono::steady_clock::now();
  const std::string failure = rank_ == 0 ? awaitAll(options, waitAllRanks) : reportToRankZero(options);
  if (flight != nullptr) {
    flight->end(entry, 1, failure.empty() ? Status::ok() : Status::internal(failure));
    if (!failure.empty()) flight->fail();
  }
  if (onDone) {
    onDone({OpType::BARRIER, options.sequence, {}, failure.empty(), started, std::chrono::steady_clock::now()});
  }
  TORCH_CHECK_WITH(DistBackendError, failure.empty(), "farandole: ", communicator_->nameOf(rank_), ": ", failure);
}

std::string ProcessGroupFarandole::reportToRankZero(WorkOptions options) {
  const auto timeout = options.timeout;
  options.timeout += timeout / 4 + std::chrono::seconds(1);  // rank 0 gives its verdict when its timeout has come
  const at::Tensor verdict = at::full({1}, kAllCame, at::kInt);
  try {
    startBarrierPart(options, {verdict}, [&](Program& program) {
      const collective::Slice answer = sliceOf(verdict);
      program.send(0, nullptr, 0);
      program.recv(0, answer.data, answer.bytes);
    })->wait();
  } catch (const c10::Error& error) {
    return communicator_->nameOf(0) + " gave no verdict in monitoredBarrier: " + error.what_without_backtrace();
  }
  const auto missing = verdict.item<std::int32_t>();
  return missing == kAllCame
             ? ""
             : failureText(communicator_->nameOf(missing), timeout) + ", says " + communicator_->nameOf(0);
}

std::string ProcessGroupFarandole::awaitAll(const WorkOptions& options, bool waitAllRanks) {
  std::vector<c10::intrusive_ptr<CollectiveWork>> arrivals;
  for (int rank = 1; rank < size_; ++rank) {
    arrivals.push_back(startBarrierPart(options, {}, [&](Program& program) { program.recv(rank, nullptr, 0); }));
  }
  std::vector<int> missing;
  std::string cause;
  for (int rank = 1; rank < size_ && (waitAllRanks || missing.empty()); ++rank) {
    try {
      arrivals[rank - 1]->wait();
    } catch (const c10::Error& error) {
      if (getError() != ::c10d::ErrorType::SUCCESS)
        return error.what_without_backtrace();  // a death, or an abort: no rank is late
      if (missing.empty()) cause = error.what_without_backtrace();
      missing.push_back(rank);
    }
  }
  // Those that come late, or were not looked at, are told too: but nobody waits for them to hear it.
  const at::Tensor verdict = at::full({1}, missing.empty() ? kAllCame : missing[0], at::kInt);
  const collective::Slice answer = sliceOf(verdict);
  std::vector<c10::intrusive_ptr<CollectiveWork>> answers;
  for (int rank = 1; rank < size_; ++rank) {
    answers.push_back(
        startBarrierPart(options, {verdict}, [&](Program& program) { program.send(rank, answer.data, answer.bytes); }));
  }
  if (!missing.empty()) return failureText(communicator_->nameOf(missing), options.timeout) + ": " + cause;
  for (int rank = 1; rank < size_; ++rank) {
    try {
      answers[rank - 1]->wait();
    } catch (const c10::Error& error) {
      return failureText(communicator_->nameOf(rank), options.timeout) + ": " + error.what_without_backtrace();
    }
  }
  return "";
}

}  // namespace farandole::backend
