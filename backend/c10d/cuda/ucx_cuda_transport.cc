// UCX for messages of CUDA tensors (backend/c10d/cuda_transport.h).
#include <unistd.h>

#include <map>
#include <mutex>
#include <thread>

#include "backend/c10d/cuda/cuda_environment.h"
#include "backend/c10d/cuda/device_transport.h"
#include "backend/c10d/cuda/stream_gates.h"
#include "backend/c10d/cuda_transport.h"
#include "backend/transport/ucx/ucx_transport.h"

namespace farandole::backend {
namespace {

using transport::DeviceVisit;
using transport::EventPool;

class UcxCudaTransport final : public CudaTransport {
 public:
  UcxCudaTransport(const CudaEnvironment& environment, std::unique_ptr<transport::Transport> ucx)
      : environment_(environment), loop_("farandole-cuda") {
    auto transport = std::make_unique<DeviceTransport>(std::move(ucx), cuda());
    transport_ = transport.get();
    connections_ = std::make_unique<transport::Connections>(std::move(transport), loop_);
    gates_ = std::make_unique<StreamGates>(connections_->engine(), loop_, cuda());
  }
  ~UcxCudaTransport() override { loop_.stop(); }

  transport::Connections& connections() override { return *connections_; }

  Result<std::shared_ptr<StreamMark>> mark(at::Device device) override {
    const DeviceVisit visit(cuda(), device.index());
    cudaStream_t const stream = environment_.currentStream(device.index());
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    FARANDOLE_RETURN_IF_ERROR(cuda().check(cuda().streamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
    if (capture != cudaStreamCaptureStatusNone) {
      return Status::invalidArgument(
          "a message of CUDA tensors is captured in a graph, but FARANDOLE_CUDA_MESSAGES is 'ucx': UCX knows no "
          "streams, and the host would have to take part in a replay; expected 'nccl', or messages outside of graphs");
    }
    auto event = eventsOf(device.index())->take();
    if (!event) return event.status();
    FARANDOLE_RETURN_IF_ERROR(event->record(stream, false));
    return std::make_shared<StreamMark>(StreamMark{std::move(event).value(), device.index(), stream});
  }

  void openAfter(const std::shared_ptr<StreamMark>& mark, c10::intrusive_ptr<GatedMessagesWork> work) override {
    transport::ProgressEngine::Access access(connections_->engine());
    transport_->setDevice(mark->device);
    gates_->add(mark, std::move(work));
  }

  bool isOurs() const { return getpid() == pid_; }
  bool inLoop() const { return loop_.inLoop(); }
  void leave() {
    {
      transport::ProgressEngine::Access access(connections_->engine());
      access.transport().leave();
    }
    loop_.stop();
  }

 private:
  const transport::CudaApi& cuda() const { return environment_.runtime->cuda; }

  std::shared_ptr<EventPool> eventsOf(int device) {
    std::lock_guard lock(eventsMutex_);
    auto& events = events_[device];
    if (events == nullptr) events = std::make_shared<EventPool>(cuda(), device);
    return events;
  }

  const int pid_ = getpid();
  const CudaEnvironment environment_;
  std::mutex eventsMutex_;
  std::map<int, std::shared_ptr<EventPool>> events_;  // by device
  net::EventLoop loop_;
  DeviceTransport* transport_ = nullptr;  // of connections_
  std::unique_ptr<transport::Connections> connections_;
  std::unique_ptr<StreamGates> gates_;
};

// The one of all groups, while there is one.
struct Shared {
  std::mutex mutex;
  std::weak_ptr<UcxCudaTransport> current;

  static Shared& get() {
    static auto* const shared = new Shared;  // used until the very end
    return *shared;
  }
};

void destroy(UcxCudaTransport* gone) {
  if (!gone->isOurs()) return;  // a leak in a forked child: it is the parent's
  // The last group may be let go of by an operation that completes on the loop, which cannot end itself.
  if (gone->inLoop()) {
    std::thread([gone] { delete gone; }).detach();
  } else {
    delete gone;
  }
}

}  // namespace

Result<std::shared_ptr<CudaTransport>> CudaTransport::acquire() {
  Shared& shared = Shared::get();
  std::lock_guard lock(shared.mutex);
  auto current = shared.current.lock();
  if (current == nullptr || !current->isOurs()) {
    const auto environment = CudaEnvironment::current();
    if (!environment) return environment.status();
    const auto unexpected = transport::unexpectedBytesSetting();
    if (!unexpected) return unexpected.status();
    auto ucx = transport::UcxTransport::create(environment->messageMemory, *unexpected);
    if (!ucx) return ucx.status();
    current = {new UcxCudaTransport(*environment, std::move(ucx).value()), &destroy};
    shared.current = current;
  }
  return std::shared_ptr<CudaTransport>(std::move(current));
}

void CudaTransport::leaveAtExit() {
  std::shared_ptr<UcxCudaTransport> transport;
  {
    Shared& shared = Shared::get();
    std::lock_guard lock(shared.mutex);
    transport = shared.current.lock();
  }
  if (transport != nullptr && transport->isOurs()) transport->leave();
}

}  // namespace farandole::backend
