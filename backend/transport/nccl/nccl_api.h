#pragma once

#include <nccl.h>

#include <string>

#include "backend/common/status.h"

namespace farandole::transport {

// NCCL's functions, taken at run time from the library that torch has loaded;
// never from a second copy, which would have a state of its own. Every call of
// NCCL goes through such a table, so that a test can put its own functions there.
struct NcclApi {
  decltype(&::ncclGetVersion) getVersion = nullptr;
  decltype(&::ncclGetErrorString) getErrorString = nullptr;
  decltype(&::ncclGetLastError) getLastError = nullptr;
  decltype(&::ncclGetUniqueId) getUniqueId = nullptr;
  decltype(&::ncclCommInitRankConfig) commInitRankConfig = nullptr;
  decltype(&::ncclCommGetAsyncError) commGetAsyncError = nullptr;
  decltype(&::ncclCommFinalize) commFinalize = nullptr;
  decltype(&::ncclCommDestroy) commDestroy = nullptr;
  decltype(&::ncclCommAbort) commAbort = nullptr;
  decltype(&::ncclGroupStart) groupStart = nullptr;
  decltype(&::ncclGroupEnd) groupEnd = nullptr;
  decltype(&::ncclSend) send = nullptr;
  decltype(&::ncclRecv) recv = nullptr;
  decltype(&::ncclAllReduce) allReduce = nullptr;
  decltype(&::ncclBroadcast) broadcast = nullptr;
  decltype(&::ncclReduce) reduce = nullptr;
  decltype(&::ncclAllGather) allGather = nullptr;
  decltype(&::ncclReduceScatter) reduceScatter = nullptr;

  // kUnavailable when no NCCL is loaded, when it lacks a function, or when it is
  // older than what farandole supports; the message says which.
  static Result<NcclApi> load();

  // "2.30.7".
  Result<std::string> version() const;
  // Ok, or NCCL's text for the code and its last error after `what`.
  Status check(ncclResult_t result, const std::string& what) const;
};

}  // namespace farandole::transport
