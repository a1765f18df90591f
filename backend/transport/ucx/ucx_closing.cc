#include "backend/transport/ucx/ucx_closing.h"

#include <chrono>

namespace farandole::transport {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kFlushTimeout = std::chrono::milliseconds(500);
constexpr auto kDiscardTimeout = std::chrono::seconds(5);
constexpr ucp_request_param_t kPlain = {};

// Frees what has completed of `handles`, which holds the rest when the time is over.
void finish(const std::function<void()>& progress, std::vector<ucs_status_ptr_t>& handles, Clock::time_point deadline) {
  const auto isDone = [](ucs_status_ptr_t handle) {
    if (!UCS_PTR_IS_PTR(handle)) return true;
    if (ucp_request_check_status(handle) == UCS_INPROGRESS) return false;
    ucp_request_free(handle);
    return true;
  };
  for (std::erase_if(handles, isDone); !handles.empty(); std::erase_if(handles, isDone)) {
    if (Clock::now() > deadline) return;
    progress();
  }
}

ucs_status_ptr_t closeByForce(ucp_ep_h endpoint) {
  ucp_request_param_t force = {};
  force.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  force.flags = UCP_EP_CLOSE_FLAG_FORCE;
  return ucp_ep_close_nbx(endpoint, &force);
}

std::vector<ucs_status_ptr_t> startFlushes(const std::vector<ucp_ep_h>& endpoints) {
  std::vector<ucs_status_ptr_t> handles;
  handles.reserve(2 * endpoints.size() + 1);
  for (ucp_ep_h endpoint : endpoints) handles.push_back(ucp_ep_flush_nbx(endpoint, &kPlain));
  return handles;
}

}  // namespace

void flushEndpoints(const std::vector<ucp_ep_h>& endpoints, const std::function<void()>& progress) {
  std::vector<ucs_status_ptr_t> handles = startFlushes(endpoints);
  finish(progress, handles, Clock::now() + kFlushTimeout);
  // The rest goes on by itself.
  for (ucs_status_ptr_t handle : handles) ucp_request_free(handle);
}

void discardEndpoint(ucp_ep_h endpoint) {
  const ucs_status_ptr_t handle = closeByForce(endpoint);
  if (UCS_PTR_IS_PTR(handle)) ucp_request_free(handle);  // it goes on by itself
}

// A worker that is destroyed while it discards what a closed or failed endpoint had under way
// corrupts the heap (UCX 1.22: a filter of ucs_callbackq_remove_oneshot adds to the queue that is
// searched). Its flush waits for that, and the calls after it complete the last requests.
bool closeEndpoints(ucp_worker_h worker, const std::vector<ucp_ep_h>& endpoints) {
  const auto progress = [worker] { (void)ucp_worker_progress(worker); };
  std::vector<ucs_status_ptr_t> handles = startFlushes(endpoints);
  finish(progress, handles, Clock::now() + kFlushTimeout);

  for (ucp_ep_h endpoint : endpoints) handles.push_back(closeByForce(endpoint));
  handles.push_back(ucp_worker_flush_nbx(worker, &kPlain));
  const auto deadline = Clock::now() + kDiscardTimeout;
  finish(progress, handles, deadline);
  while (ucp_worker_progress(worker) != 0 && Clock::now() < deadline) {
  }
  return handles.empty();
}

}  // namespace farandole::transport
