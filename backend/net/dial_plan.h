#pragma once

#include <chrono>
#include <string>
#include <variant>
#include <vector>

#include "backend/common/status.h"

namespace farandole::net {

// Which of a peer's addresses to try next, after which pause, and when to give
// up. A peer listens before it publishes its address, so "refused" by all is
// soon believed: its process is gone. An address that stays silent is given up
// after `silence`, unless somebody took a connection there: a stopped process
// does, and is given until `patience`. Pure: the time is an argument.
class DialPlan {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Attempt {
    std::string host;
    std::chrono::milliseconds pause;  // before it
    std::chrono::milliseconds limit;  // for it
  };
  enum class Outcome { kRefused, kSilent, kOther };

  DialPlan(std::vector<std::string> hosts, std::chrono::milliseconds silence, std::chrono::milliseconds patience,
           Time now);

  // kPeerFailed when refused, else kTimeout.
  std::variant<Attempt, Status> next(Time now);

  // Of the attempt that next() gave last.
  void connected() { connected_ = true; }
  void failed(Outcome outcome, const std::string& why);

 private:
  const std::vector<std::string> hosts_;
  const Time silenceEnd_;
  const Time patienceEnd_;
  std::size_t attempts_ = 0;
  int refusedInRow_ = 0;
  bool connected_ = false;
  std::string lastFailure_ = "nothing was tried";
};

}  // namespace farandole::net
