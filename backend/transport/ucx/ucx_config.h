#pragma once

#include <ucp/api/ucp.h>

#include "backend/common/status.h"

namespace farandole::transport {

// What messages lie in: the host's memory; what UCX finds them in; the same, and CUDA's must be among what it knows.
enum class UcxMemory : unsigned char { kHost, kDetected, kCuda };

// UCX's configuration from the environment, with farandole's defaults where the
// environment (UCX_*) says nothing.
Result<ucp_config_t*> readUcxConfig(UcxMemory memory);

// Whether the UCX that is loaded is one that this build can run with. A system's
// UCX and the wheel's have the same SONAME: whichever is loaded first serves both.
Status checkUcxVersion();

// Ok, or what keeps CUDA's memory from this context.
Status checkCudaMemory(ucp_context_h context);

// "what: UCX's text for the code".
Status ucxError(const std::string& what, ucs_status_t status);

}  // namespace farandole::transport
