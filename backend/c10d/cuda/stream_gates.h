#pragma once

#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <utility>
#include <vector>

#include "backend/c10d/cuda_transport.h"
#include "backend/net/event_loop.h"
#include "backend/transport/nccl/device_event.h"

namespace farandole::backend {

struct StreamMark {
  transport::DeviceEvent event;
  int device;
  cudaStream_t stream;
  bool isPassed = false;  // was seen; with the transport held
};

// Messages that wait for streams. UCX knows no streams, and a stream tells nobody where it is: whoever progresses the
// transport looks, and the loop by timer, so that a sleeper need not. With the transport held, except where said.
class StreamGates final : private transport::ProgressEngine::Poller {
 public:
  StreamGates(transport::ProgressEngine& engine, net::EventLoop& loop, const transport::CudaApi& cuda)
      : engine_(engine), loop_(loop), cuda_(cuda), tick_(loop.context()) {}

  void add(const std::shared_ptr<StreamMark>& mark, c10::intrusive_ptr<GatedMessagesWork> work);

 private:
  struct Gate {
    std::shared_ptr<StreamMark> mark;
    c10::intrusive_ptr<GatedMessagesWork> work;
  };

  bool poll() override { return openPassed(); }
  bool isReady(bool) override { return false; }
  // Opens what can be; true when something was.
  bool openPassed();
  // Whether it is settled: opened now, or ended before.
  bool settle(const Gate& gate, const std::vector<Gate>& held);
  Result<bool> isPassed(StreamMark& mark);
  void tickFromLoop(std::chrono::nanoseconds interval);

  transport::ProgressEngine& engine_;
  net::EventLoop& loop_;
  const transport::CudaApi& cuda_;
  boost::asio::steady_timer tick_;  // the loop's
  std::vector<Gate> gates_;         // in the order of issue
  // Of one look: streams that have not come to a mark, nor to later ones. Default streams have one handle for all
  // devices.
  std::vector<std::pair<int, cudaStream_t>> behind_;
};

}  // namespace farandole::backend
