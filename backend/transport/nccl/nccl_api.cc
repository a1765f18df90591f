#include "backend/transport/nccl/nccl_api.h"

#include <dlfcn.h>

namespace farandole::transport {
namespace {

constexpr int kOldestVersion = 22700;  // 2.27.0

template <typename Function>
Status take(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr ? Status::ok()
                             : Status::unavailable(std::string("the loaded NCCL has no function ") + name);
}

std::string versionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

Result<NcclApi> NcclApi::load() {
  // NOLOAD: only what torch has loaded already. The handle is kept: the library stays.
  void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    return Status::unavailable(
        "no NCCL is loaded in this process: torch was built without CUDA, or links it statically");
  }
  NcclApi api;
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclGetVersion", api.getVersion));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclGetErrorString", api.getErrorString));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclGetLastError", api.getLastError));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclGetUniqueId", api.getUniqueId));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclCommInitRankConfig", api.commInitRankConfig));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclCommGetAsyncError", api.commGetAsyncError));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclCommFinalize", api.commFinalize));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclCommDestroy", api.commDestroy));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclCommAbort", api.commAbort));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclGroupStart", api.groupStart));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclGroupEnd", api.groupEnd));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclSend", api.send));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclRecv", api.recv));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclAllReduce", api.allReduce));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclBroadcast", api.broadcast));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclReduce", api.reduce));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclAllGather", api.allGather));
  FARANDOLE_RETURN_IF_ERROR(take(library, "ncclReduceScatter", api.reduceScatter));
  int version = 0;
  FARANDOLE_RETURN_IF_ERROR(api.check(api.getVersion(&version), "ncclGetVersion"));
  if (version < kOldestVersion) {
    return Status::unavailable("the loaded NCCL is " + versionText(version) + "; expected " +
                               versionText(kOldestVersion) + " or newer");
  }
  return api;
}

Result<std::string> NcclApi::version() const {
  int version = 0;
  FARANDOLE_RETURN_IF_ERROR(check(getVersion(&version), "ncclGetVersion"));
  return versionText(version);
}

Status NcclApi::check(ncclResult_t result, const std::string& what) const {
  if (result == ncclSuccess) return Status::ok();
  std::string text = what + ": " + getErrorString(result);
  const char* const detail = getLastError(nullptr);
  if (detail != nullptr && *detail != '\0') text += std::string(" (") + detail + ")";
  return Status(result == ncclRemoteError ? StatusCode::kPeerFailed : StatusCode::kInternal, std::move(text));
}

}  // namespace farandole::transport
