#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "ddp/collectives.h"

namespace farandole::ddp {

// What happened in rounds, and when, for who asks for it. Recorded by whatever thread
// it happens on; any thread may read. Times are seconds of std::chrono::steady_clock,
// which is Python's time.monotonic().
class Timeline : public std::enable_shared_from_this<Timeline> {
 public:
  enum class Kind {
    kReady,       // a parameter: its gradient is there; lasts no time
    kReduction,   // a bucket, from its issue on
    kWait,        // at the end of a round, for all reductions
    kReport,      // at the end of a round: ranks tell each other whether all is well
    kGather,      // the parameters of a bucket, from the start on
    kGatherWait,  // for those
  };

  struct Event {
    Kind kind;
    int index;  // of the parameter or the bucket
    int round;  // from 0: gathers are of the round that comes after them
    double start;
    double end;    // 0: not yet
    bool isExact;  // else it was seen to be over then, and may have been before
  };

  // Something begins now. Returns the index that other calls take.
  std::size_t begin(Kind kind, int index = 0);
  void end(std::size_t event);      // now, if nothing has ended it
  void mark(Kind kind, int index);  // at one moment

  // It ends with the work: when the work's future tells so, or, where that cannot tell (on CUDA it completes when
  // the work is enqueued), when see() is called. Does not block. Without work: at once.
  void endWith(std::size_t event, const WorkPtr& work, c10::DeviceType device);
  // It is over now, and nobody knows since when, if nothing has ended it.
  void see(std::size_t event);

  // The round is over.
  void endRound();
  int rounds() const;

  std::vector<Event> events() const;

 private:
  static double now();
  void finish(std::size_t event, bool isExact);

  mutable std::mutex mutex_;  // guards all below; nothing else is locked under it
  std::vector<Event> events_;
  int rounds_ = 0;
};

}  // namespace farandole::ddp
