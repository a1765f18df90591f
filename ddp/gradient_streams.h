#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

namespace farandole::ddp {

// The streams on which the gradients of a round come: autograd adds up a parameter's on the one on which it was first
// used, which need not be that of others. Nothing on the CPU. Not synchronized: its GradReducer is.
class GradientStreams {
 public:
  explicit GradientStreams(c10::Device device) : device_(device) {}

  // A gradient has come on the current stream.
  void note();
  // What is put on the current stream from now on sees all that have come.
  void join() const;
  void clear() { streams_.clear(); }

 private:
  const c10::Device device_;
  std::vector<c10::Stream> streams_;  // each once
};

}  // namespace farandole::ddp
