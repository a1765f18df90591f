#pragma once

#include <ucp/api/ucp.h>

#include "backend/common/status.h"

namespace farandole::transport {

// What UCX may use. Networks reach the ranks of a host, too. Its shared memory
// - hangs between processes of a host that share no network namespace (two containers), since its wake-ups do not pass
//   from one to the other;
// - has a queue in each process that all others write into, in two steps: a place is taken, then filled. Who is killed
//   in between has stopped that queue for everybody.
enum class UcxLanes : unsigned char { kNetworks, kAll };

// What messages lie in: the host's memory; what UCX finds them in; the same, and CUDA's must be among what it knows.
enum class UcxMemory : unsigned char { kHost, kDetected, kCuda };

// UCX's configuration from the environment, with farandole's defaults where the
// environment (UCX_*) says nothing.
Result<ucp_config_t*> readUcxConfig(UcxMemory memory, UcxLanes lanes);

// Whether the UCX that is loaded is one that this build can run with. A system's
// UCX and the wheel's have the same SONAME: whichever is loaded first serves both.
Status checkUcxVersion();

// Ok, or what keeps CUDA's memory from this context.
Status checkCudaMemory(ucp_context_h context);

// "what: UCX's text for the code".
Status ucxError(const std::string& what, ucs_status_t status);

}  // namespace farandole::transport
