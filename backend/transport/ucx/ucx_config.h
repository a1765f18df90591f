#pragma once

#include <ucp/api/ucp.h>

#include "backend/common/status.h"

namespace farandole::transport {

// Whom UCX is to reach. The processes of a host that share no network namespace
// (two containers) count as other hosts: UCX's shared memory would connect them,
// and hang, since its wake-ups do not pass from one namespace to the other.
enum class UcxReach : unsigned char { kEverybody, kOtherHosts };

// UCX's configuration from the environment, with farandole's defaults where the
// environment (UCX_*) says nothing.
Result<ucp_config_t*> readUcxConfig(UcxReach reach);

// Whether the UCX that is loaded is one that this build can run with. A system's
// UCX and the wheel's have the same SONAME: whichever is loaded first serves both.
Status checkUcxVersion();

// "what: UCX's text for the code".
Status ucxError(const std::string& what, ucs_status_t status);

}  // namespace farandole::transport
