#include "backend/transport/nccl/nccl_api.h"

#include <dlfcn.h>

namespace farandole::transport {
namespace {

constexpr int kOldestVersion = 22700;  // 2.27.0

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
#define FARANDOLE_TAKE(member, function, ...) \
  api.member = reinterpret_cast<decltype(api.member)>(dlsym(library, #function));
  FARANDOLE_NCCL_FUNCTIONS(FARANDOLE_TAKE)
  FARANDOLE_NCCL_NEWER_FUNCTIONS(FARANDOLE_TAKE)
#undef FARANDOLE_TAKE
#define FARANDOLE_REQUIRE(member, function) \
  if (api.member == nullptr) return Status::unavailable("the loaded NCCL has no function " #function);
  FARANDOLE_NCCL_FUNCTIONS(FARANDOLE_REQUIRE)
#undef FARANDOLE_REQUIRE
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

Status NcclApi::lacks(const char* function) const {
  const auto loaded = version();
  return Status::unavailable("the loaded NCCL" + (loaded ? " " + *loaded : std::string()) + " has no function " +
                             function + ", which newer ones have");
}

Status NcclApi::check(ncclResult_t result, const std::string& what) const {
  if (result == ncclSuccess) return Status::ok();
  std::string text = what + ": " + getErrorString(result);
  const char* const detail = getLastError(nullptr);
  if (detail != nullptr && *detail != '\0') text += std::string(" (") + detail + ")";
  return Status(result == ncclRemoteError ? StatusCode::kPeerFailed : StatusCode::kInternal, std::move(text));
}

}  // namespace farandole::transport
