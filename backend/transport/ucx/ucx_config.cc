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
    // Networks reach the ranks of a host, too. UCX's shared memory
    // - has a queue in each process that all others write into, in two steps: a place is taken, then filled. Who is
    //   killed in between has stopped that queue for everybody;
    // - hangs between processes of a host that share no network namespace (two containers), since its wake-ups do not
    //   pass from one to the other.
    Default{"TLS", "^shm"},
    // For who sets UCX_TLS: error mode PEER drops shared memory unless these declare that they support it.
    Default{"POSIX_ERROR_HANDLING", "y"},
    Default{"SYSV_ERROR_HANDLING", "y"},
    Default{"CMA_MEMORY_INVALIDATE", "y"},
    // Segments of 8K/64K hold TCP on loopback to 1.8 GB/s, these give 5.
    Default{"TCP_TX_SEG_SIZE", "64K"},
    Default{"TCP_RX_SEG_SIZE", "256K"},
    // To connect without waiting, and learn of a failure from progress. One that fails at once ends this process (an
    // assertion in 1.22) where it takes the place of a connection that the peer had made and died with.
    Default{"TCP_CONN_NB", "y"},
    // Its looks for dead peers, every 20 s, are too late to be of use, and a crash (1.22) where one of them has asked
    // to be connected before it died: the control plane knows the dead, and has them dropped.
    Default{"KEEPALIVE_INTERVAL", "inf"},
};
// Its cache of what memory is on a device takes all for the host's that was allocated before UCX was loaded, as by
// torch, and hooks the driver's functions for the rest. Without it UCX asks the driver, for each message.
constexpr Default kNoMemoryTypeCache{"MEMTYPE_CACHE", "n"};

void setDefault(ucp_config_t* config, const Default& setting) {
  if (std::getenv((std::string("UCX_") + setting.name).c_str()) != nullptr) return;
  // A UCX that does not know the name keeps its own default.
  (void)ucp_config_modify(config, setting.name, setting.value);
}

}  // namespace

Status ucxError(const std::string& what, ucs_status_t status) {
  // An I/O error is what reading the memory of a process that has just died gives.
  const StatusCode code = status == UCS_ERR_CANCELED ? StatusCode::kAborted
                          : status == UCS_ERR_ENDPOINT_TIMEOUT || status == UCS_ERR_CONNECTION_RESET ||
                                  status == UCS_ERR_NOT_CONNECTED || status == UCS_ERR_UNREACHABLE ||
                                  status == UCS_ERR_IO_ERROR
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

Status checkCudaMemory(ucp_context_h context) {
  ucp_context_attr_t attributes = {};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (const ucs_status_t status = ucp_context_query(context, &attributes); status != UCS_OK) {
    return ucxError("ucp_context_query", status);
  }
  if ((attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0) return Status::ok();
  const char* const transports = std::getenv("UCX_TLS");
  return Status::unavailable(std::string("UCX ") + ucp_get_version_string() +
                             " knows no memory of CUDA here: it was built without CUDA, finds no driver (libcuda.so.1, "
                             "libnvidia-ml.so.1) or no GPU, or may not use it (UCX_TLS is " +
                             (transports != nullptr ? "'" + std::string(transports) + "'" : "not set") +
                             "; expected cuda_copy and cuda_ipc in it, and shm or tcp, or that it is not set)");
}

Result<ucp_config_t*> readUcxConfig(UcxMemory memory) {
  ucp_config_t* config = nullptr;
  if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &config); status != UCS_OK) {
    return ucxError("reading the UCX_* environment", status);
  }
  for (const Default& setting : kDefaults) setDefault(config, setting);
  if (memory != UcxMemory::kHost) setDefault(config, kNoMemoryTypeCache);
  return config;
}

}  // namespace farandole::transport
