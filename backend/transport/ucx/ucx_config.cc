#include "backend/transport/ucx/ucx_config.h"

#include <array>
#include <cstdlib>
#include <string>

namespace farandole::transport {
namespace {

constexpr unsigned kOldestMinor = 13;  // the first with what ucx_transport.cc calls

struct Default {
  const char* name;
  const char* value;
};

constexpr std::array kDefaults = {
    // Error mode PEER drops shared memory unless these declare that they support it.
    Default{"POSIX_ERROR_HANDLING", "y"},
    Default{"SYSV_ERROR_HANDLING", "y"},
    Default{"CMA_MEMORY_INVALIDATE", "y"},
    // Segments of 8K/64K hold TCP on loopback to 1.8 GB/s, these give 5.
    Default{"TCP_TX_SEG_SIZE", "64K"},
    Default{"TCP_RX_SEG_SIZE", "256K"},
};
constexpr Default kNoSharedMemory{"TLS", "^shm"};

void setDefault(ucp_config_t* config, const Default& setting) {
  if (std::getenv((std::string("UCX_") + setting.name).c_str()) != nullptr) return;
  // A UCX that does not know the name keeps its own default.
  (void)ucp_config_modify(config, setting.name, setting.value);
}

}  // namespace

Status ucxError(const std::string& what, ucs_status_t status) {
  const StatusCode code = status == UCS_ERR_CANCELED ? StatusCode::kAborted
                          : status == UCS_ERR_ENDPOINT_TIMEOUT || status == UCS_ERR_CONNECTION_RESET ||
                                  status == UCS_ERR_NOT_CONNECTED || status == UCS_ERR_UNREACHABLE
                              ? StatusCode::kPeerLeft
                              : StatusCode::kInternal;
  return Status(code, what + ": " + ucs_status_string(status));
}

Status checkUcxVersion() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  if (major == UCP_API_MAJOR && minor >= kOldestMinor) return Status::ok();
  return Status::unavailable("the loaded UCX is " + std::to_string(major) + "." + std::to_string(minor) +
                             "; expected 1." + std::to_string(kOldestMinor) + " or a newer 1.x");
}

Result<ucp_config_t*> readUcxConfig(UcxReach reach) {
  ucp_config_t* config = nullptr;
  if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &config); status != UCS_OK) {
    return ucxError("reading the UCX_* environment", status);
  }
  for (const Default& setting : kDefaults) setDefault(config, setting);
  if (reach == UcxReach::kOtherHosts) setDefault(config, kNoSharedMemory);
  return config;
}

}  // namespace farandole::transport
