#include "tests/backend/transport/nccl/simulator/cuda_functions.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "tests/backend/transport/nccl/simulator/capture.h"

namespace farandole::testing {

const char* CudaFunctions::getErrorString(cudaError_t error) {
  const std::lock_guard lock(core_.mutex);
  std::string& text = texts_[error];
  if (text.empty()) text = "simulated CUDA error " + std::to_string(static_cast<int>(error));
  return text.c_str();
}

cudaError_t CudaFunctions::getLastError() { return std::exchange(thread().lastError, cudaSuccess); }

cudaError_t CudaFunctions::getDevice(int* device) {
  *device = thread().device;
  return cudaSuccess;
}

cudaError_t CudaFunctions::setDevice(int device) {
  if (device < 0 || device >= core_.numDevices()) return cudaErrorInvalidDevice;
  thread().device = device;
  return cudaSuccess;
}

cudaError_t CudaFunctions::streamCreate(cudaStream_t* stream, unsigned flags, int priority) {
  const std::lock_guard lock(core_.mutex);
  *stream = streams_.create(thread().device, Stream::Kind::kCreated)->handle();
  return cudaSuccess;
}

cudaError_t CudaFunctions::streamDestroy(cudaStream_t handle) {
  const std::lock_guard lock(core_.mutex);
  Stream* const found = handle == nullptr ? nullptr : stream(handle, "cudaStreamDestroy");
  if (found == nullptr) return cudaErrorInvalidResourceHandle;
  if (found->kind != Stream::Kind::kCreated) {
    core_.violation("cudaStreamDestroy", "the stream is the user's");
    return cudaErrorInvalidResourceHandle;
  }
  if (found->capture != nullptr) core_.violation("cudaStreamDestroy", "the stream is being captured");
  streams_.retire(*found);
  return cudaSuccess;
}

cudaError_t CudaFunctions::streamPriorities(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

cudaError_t CudaFunctions::streamWaitEvent(cudaStream_t streamHandle, cudaEvent_t eventHandle, unsigned flags) {
  const std::lock_guard lock(core_.mutex);
  Stream* const waiter = stream(streamHandle, "cudaStreamWaitEvent");
  const Event* const awaited = event(eventHandle, "cudaStreamWaitEvent");
  if (waiter == nullptr || awaited == nullptr) return cudaErrorInvalidResourceHandle;
  if (awaited->last == nullptr) return cudaSuccess;
  const std::shared_ptr<Capture> origin = awaited->last->capture.lock();
  const bool goesOn = origin != nullptr && !origin->ended;
  if (awaited->last->captured && !goesOn) {
    core_.violation("cudaStreamWaitEvent", "the event was last recorded in a capture that has ended");
    return cudaErrorCapturedEvent;
  }
  if (waiter->capture != nullptr && waiter->capture != origin) {
    core_.violation("cudaStreamWaitEvent", "a captured stream cannot wait for what is outside of its capture");
    return cudaErrorStreamCaptureIsolation;
  }
  if (goesOn) waiter->capture = origin;
  streams_.put(*waiter, std::make_shared<WaitWork>(awaited->last));
  return cudaSuccess;
}

cudaError_t CudaFunctions::streamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const std::lock_guard lock(core_.mutex);
  const Stream* const found = stream(handle, "cudaStreamIsCapturing");
  if (found == nullptr) return cudaErrorInvalidResourceHandle;
  *status = found->capture != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t CudaFunctions::threadExchangeCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread().captureMode);
  return cudaSuccess;
}

cudaError_t CudaFunctions::eventCreate(cudaEvent_t* handle, unsigned flags) {
  const std::lock_guard lock(core_.mutex);
  auto created = std::make_unique<Event>();
  created->device = thread().device;
  *handle = reinterpret_cast<cudaEvent_t>(created.get());
  events_[*handle] = std::move(created);
  return cudaSuccess;
}

cudaError_t CudaFunctions::eventDestroy(cudaEvent_t handle) {
  const std::lock_guard lock(core_.mutex);
  Event* const found = event(handle, "cudaEventDestroy");
  if (found == nullptr) return cudaErrorInvalidResourceHandle;
  found->destroyed = true;
  return cudaSuccess;
}

cudaError_t CudaFunctions::eventRecord(cudaEvent_t eventHandle, cudaStream_t streamHandle) {
  const std::lock_guard lock(core_.mutex);
  Event* const recorded = event(eventHandle, "cudaEventRecord");
  Stream* const recorder = stream(streamHandle, "cudaEventRecord");
  if (recorded == nullptr || recorder == nullptr) return cudaErrorInvalidResourceHandle;
  if (recorded->device != recorder->device) {
    core_.violation("cudaEventRecord", "event and stream are of different devices");
    return cudaErrorInvalidResourceHandle;
  }
  recorded->last = std::make_shared<Moment>();
  recorded->last->captured = recorder->capture != nullptr;
  recorded->last->capture = recorder->capture;
  streams_.put(*recorder, std::make_shared<RecordWork>(recorded->last));
  return cudaSuccess;
}

cudaError_t CudaFunctions::eventQuery(cudaEvent_t handle) {
  const std::lock_guard lock(core_.mutex);
  const Event* const found = event(handle, "cudaEventQuery");
  if (found == nullptr) return cudaErrorInvalidResourceHandle;
  if (found->last != nullptr && found->last->captured) {
    core_.violation("cudaEventQuery", "the event was last recorded in a capture");
    return cudaErrorCapturedEvent;
  }
  if (unsafeNow()) {
    core_.violation("cudaEventQuery", "not allowed in this thread's capture mode while a stream is captured");
    return cudaErrorStreamCaptureUnsupported;
  }
  return found->last == nullptr || found->last->passed ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t CudaFunctions::memcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes,
                                           cudaStream_t streamHandle) {
  const std::lock_guard lock(core_.mutex);
  Stream* const copier = stream(streamHandle, "cudaMemcpyPeerAsync");
  if (copier == nullptr) return cudaErrorInvalidResourceHandle;
  streams_.put(*copier, std::make_shared<FunctionWork>([to, from, bytes] { std::memmove(to, from, bytes); }));
  return cudaSuccess;
}

int CudaFunctions::countEvents() const {
  return static_cast<int>(
      std::count_if(events_.begin(), events_.end(), [](const auto& entry) { return !entry.second->destroyed; }));
}

CudaFunctions::Event* CudaFunctions::event(cudaEvent_t handle, const char* function) {
  const auto found = events_.find(handle);
  if (found == events_.end()) {
    core_.violation(function, "no such event");
    return nullptr;
  }
  if (found->second->destroyed) {
    core_.violation(function, "the event was destroyed");
    return nullptr;
  }
  return found->second.get();
}

bool CudaFunctions::unsafeNow() {
  const cudaStreamCaptureMode mode = thread().captureMode;
  if (mode == cudaStreamCaptureModeRelaxed) return false;
  const auto captures = streams_.captures();
  return std::any_of(captures.begin(), captures.end(), [mode](const auto& capture) {
    return mode == cudaStreamCaptureModeGlobal || capture->thread == std::this_thread::get_id();
  });
}

}  // namespace farandole::testing
