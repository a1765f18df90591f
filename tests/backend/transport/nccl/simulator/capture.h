#pragma once

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/backend/transport/nccl/simulator/streams.h"

namespace farandole::testing {

// What was put into streams while they were captured, in order; afterwards a graph. Begun in CUDA's global mode, which
// is what torch uses. A stream that waits for an event of a captured one is captured, too.
struct Capture {
  struct Item {
    Stream* stream;
    std::shared_ptr<Work> work;
  };
  // The streams, in the order in which they came in.
  std::vector<Stream*> streams() const;
  // Whether every stream but `origin` was waited for after its last work.
  bool joined(const Stream& origin) const;

  std::thread::id thread;  // which began it
  std::vector<Item> items;
  bool ended = false;
};

// One launch of a graph: the moments of its own that stand for the captured ones.
class Replay {
 public:
  // Puts the graph behind what lies in `stream`, and in front of what comes there later.
  static void launch(Streams& streams, Stream& stream, const Capture& graph);
  std::shared_ptr<Moment> momentFor(const std::shared_ptr<Moment>& captured);

 private:
  std::map<std::shared_ptr<Moment>, std::shared_ptr<Moment>> moments_;
};

void beginCapture(Core& core, Stream& stream);
void endCapture(Core& core, Streams& streams, Stream& stream);

}  // namespace farandole::testing
