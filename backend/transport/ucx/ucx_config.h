#pragma once

#include <ucp/api/ucp.h>

#include "backend/common/status.h"

namespace farandole::transport {

// UCX's configuration from the environment, with farandole's defaults where the
// environment (UCX_*) says nothing.
// With `networksOnly` shared memory is left out.
Result<ucp_config_t*> readUcxConfig(bool networksOnly);

// Whether the UCX that is loaded is one that this build can run with. A system's
// UCX and the wheel's have the same SONAME: whichever is loaded first serves both.
Status checkUcxVersion();

// "what: UCX's text for the code".
Status ucxError(const std::string& what, ucs_status_t status);

}  // namespace farandole::transport
