#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "backend/common/status.h"

// USE(member, function): what farandole calls of NCCL.
#define FARANDOLE_NCCL_FUNCTIONS(USE)                 \
  USE(getVersion, ncclGetVersion)                     \
  USE(getErrorString, ncclGetErrorString)             \
  USE(getLastError, ncclGetLastError)                 \
  USE(getUniqueId, ncclGetUniqueId)                   \
  USE(commInitRankConfig, ncclCommInitRankConfig)     \
  USE(commGetAsyncError, ncclCommGetAsyncError)       \
  USE(commFinalize, ncclCommFinalize)                 \
  USE(commDestroy, ncclCommDestroy)                   \
  USE(commAbort, ncclCommAbort)                       \
  USE(commRegister, ncclCommRegister)                 \
  USE(commDeregister, ncclCommDeregister)             \
  USE(memAlloc, ncclMemAlloc)                         \
  USE(memFree, ncclMemFree)                           \
  USE(groupStart, ncclGroupStart)                     \
  USE(groupEnd, ncclGroupEnd)                         \
  USE(send, ncclSend)                                 \
  USE(recv, ncclRecv)                                 \
  USE(allReduce, ncclAllReduce)                       \
  USE(broadcast, ncclBroadcast)                       \
  USE(reduce, ncclReduce)                             \
  USE(allGather, ncclAllGather)                       \
  USE(reduceScatter, ncclReduceScatter)               \
  USE(redOpCreatePreMulSum, ncclRedOpCreatePreMulSum) \
  USE(redOpDestroy, ncclRedOpDestroy)

// USE(member, function, type): the same of versions after 2.27. The headers may lack them, too.
#define FARANDOLE_NCCL_NEWER_FUNCTIONS(USE)                                                                         \
  USE(commShrink, ncclCommShrink, ncclResult_t(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int))             \
  USE(commRevoke, ncclCommRevoke, ncclResult_t(ncclComm_t, int))                                                    \
  USE(commWindowRegister, ncclCommWindowRegister, ncclResult_t(ncclComm_t, void*, std::size_t, ncclWindow_t*, int)) \
  USE(commWindowDeregister, ncclCommWindowDeregister, ncclResult_t(ncclComm_t, ncclWindow_t))                       \
  USE(commMemStats, ncclCommMemStats, ncclResult_t(ncclComm_t, int, std::uint64_t*))

namespace farandole::transport {

// NCCL's functions, taken at run time from the library that torch has loaded;
// never from a second copy, which would have a state of its own. Every call of
// NCCL goes through such a table, so that a test can put its own functions there.
struct NcclApi {
#define FARANDOLE_MEMBER(member, function) decltype(&::function) member = nullptr;
  FARANDOLE_NCCL_FUNCTIONS(FARANDOLE_MEMBER)
#undef FARANDOLE_MEMBER
  // Null where the loaded library has none.
#define FARANDOLE_MEMBER(member, function, type) std::add_pointer_t<type> member = nullptr;
  FARANDOLE_NCCL_NEWER_FUNCTIONS(FARANDOLE_MEMBER)
#undef FARANDOLE_MEMBER

  // kUnavailable when no NCCL is loaded, when it lacks a function, or when it is
  // older than what farandole supports; the message says which.
  static Result<NcclApi> load();

  // "2.30.7".
  Result<std::string> version() const;
  // kUnavailable: what was asked for needs a function that this version lacks.
  Status lacks(const char* function) const;
  // Ok, or NCCL's text for the code and its last error after `what`.
  Status check(ncclResult_t result, const std::string& what) const;
};

}  // namespace farandole::transport
