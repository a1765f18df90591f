#pragma once

#include <ucp/api/ucp.h>

#include <functional>
#include <vector>

namespace farandole::transport {

// Gives what was sent time to leave: until connections that are being made are there, say. `progress`
// advances the worker.
void flushEndpoints(const std::vector<ucp_ep_h>& endpoints, const std::function<void()>& progress);

// Closes one whose peer is dead: nothing is sent any more, and what waits for an answer completes, here or
// while the worker is progressed.
void discardEndpoint(ucp_ep_h endpoint);

// Closes all endpoints of a worker: what was sent has time to leave, and a peer that is gone does
// not hold it up. False when UCX did not let go of them in time: then the worker must not be
// destroyed. Requests that had not completed do so here.
bool closeEndpoints(ucp_worker_h worker, const std::vector<ucp_ep_h>& endpoints);

}  // namespace farandole::transport
