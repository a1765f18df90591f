#include "pipeline/sparse/thread_choice.h"

#include <algorithm>

namespace farandole::pipeline::sparse {

namespace {

constexpr double kWorthAThread = 0.05;  // of a step
constexpr double kWorthKeeping = 0.98;  // of the step without threads

double medianOf(const std::vector<StepTimes>& steps, double StepTimes::*field) {
  std::vector<double> values;
  values.reserve(steps.size());
  for (const StepTimes& times : steps) values.push_back(times.*field);
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

ThreadChoice::ThreadChoice(ThreadUse load, ThreadUse dist) : use_{load, dist} {
  begin(isMeasured() ? Phase::kInline : Phase::kSettled, {false, false});
}

bool ThreadChoice::isMeasured() const { return use_[0] == ThreadUse::kAsMeasured || use_[1] == ThreadUse::kAsMeasured; }

void ThreadChoice::begin(Phase phase, std::array<bool, 2> onThreads) {
  for (std::size_t i = 0; i < use_.size(); ++i) {
    now_[i] = use_[i] == ThreadUse::kAsMeasured ? onThreads[i] : use_[i] == ThreadUse::kAlways;
  }
  phase_ = phase;
  stepsInPhase_ = 0;
  window_.clear();
}

void ThreadChoice::stepTook(const StepTimes& times) {
  if (!isMeasured()) return;
  ++stepsInPhase_;
  if (phase_ == Phase::kSettled) {
    if (stepsInPhase_ >= period_) begin(Phase::kInline, {false, false});
    return;
  }
  if (stepsInPhase_ <= kWarmUp) return;
  window_.push_back(times);
  if (window_.size() < kWindow) return;
  phase_ == Phase::kInline ? judgeInline() : judgeThreaded();
}

void ThreadChoice::judgeInline() {
  inlineStep_ = medianOf(window_, &StepTimes::step);
  if (roundsWon_ == 0) {
    candidates_ = {medianOf(window_, &StepTimes::loadBlocked) > kWorthAThread * inlineStep_,
                   medianOf(window_, &StepTimes::distBlocked) > kWorthAThread * inlineStep_};
  }
  if (candidates_[0] || candidates_[1]) return begin(Phase::kThreaded, candidates_);
  settle(candidates_);
}

void ThreadChoice::judgeThreaded() {
  const bool isFaster = medianOf(window_, &StepTimes::step) < kWorthKeeping * inlineStep_;
  const std::size_t rounds = now_ == settled_ ? 1 : kRounds;
  if (isFaster && ++roundsWon_ < rounds) return begin(Phase::kInline, {false, false});
  settle(isFaster ? now_ : std::array<bool, 2>{false, false});
}

void ThreadChoice::settle(std::array<bool, 2> choice) {
  roundsWon_ = 0;
  begin(Phase::kSettled, choice);
  constexpr std::size_t kLongest = 32 * kPeriod;
  period_ = settled_ == now_ ? std::min(2 * period_, kLongest) : kPeriod;
  settled_ = now_;
}

}  // namespace farandole::pipeline::sparse
