#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace farandole::pipeline::sparse {

enum class ThreadUse { kNever, kAlways, kAsMeasured };

// Where a step's time went, in seconds.
struct StepTimes {
  double step = 0;
  double loadBlocked = 0;  // of its own time that load waited without computing
  double distBlocked = 0;
};

// Which of load and input_dist run beside the forward, on threads of their own, and which before it. A thread pays
// where a stage waits (for storage, for other machines), and costs hand-overs where it computes, or all of it holds one
// interpreter lock. So a stage that waits over a twentieth of the step is a candidate; then as many steps are timed
// with it on a thread, and it goes there if their median is shorter, kRounds times in a row: steps that differ by what
// else the machine does win once as often as not. Looked at again after kPeriod steps, and then after twice as many
// each time that the choice was the same; one round keeps it.
class ThreadChoice {
 public:
  ThreadChoice(ThreadUse load, ThreadUse dist);

  bool loadOnThread() const { return now_[0]; }
  bool distOnThread() const { return now_[1]; }

  // Whether steps are being compared; what times them costs the same in all of these.
  bool isTiming() const { return phase_ != Phase::kSettled; }

  // After each full step, with what it took where the stages were.
  void stepTook(const StepTimes& times);

  static constexpr std::size_t kWarmUp = 2;  // steps that are looked at by nobody
  static constexpr std::size_t kWindow = 7;  // steps timed each way
  static constexpr std::size_t kRounds = 3;
  static constexpr std::size_t kPeriod = 500;

 private:
  enum class Phase { kSettled, kInline, kThreaded };
  bool isMeasured() const;
  void begin(Phase phase, std::array<bool, 2> onThreads);
  void judgeInline();
  void judgeThreaded();
  void settle(std::array<bool, 2> choice);

  std::array<ThreadUse, 2> use_;
  std::array<bool, 2> now_{};
  Phase phase_ = Phase::kSettled;
  std::size_t stepsInPhase_ = 0;
  std::size_t period_ = kPeriod;
  std::vector<StepTimes> window_;
  double inlineStep_ = 0;
  std::size_t roundsWon_ = 0;
  std::array<bool, 2> candidates_{};
  std::array<bool, 2> settled_{};
};

}  // namespace farandole::pipeline::sparse
