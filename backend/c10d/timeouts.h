#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace farandole::backend {

// Whether a call was given none, in either of c10d's two ways: then that of its group, or of its work, holds.
inline bool isUnset(std::chrono::milliseconds timeout) {
  return timeout == kNoTimeout || timeout == ::c10d::kUnsetTimeout;
}

// Throws ValueError where it is negative.
inline void checkTimeout(const char* call, std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() >= 0, call, ": timeout is ", timeout.count(), " ms; expected 0 or more");
}

// Of one call, which may have none.
inline void checkOwnTimeout(const char* call, std::chrono::milliseconds timeout) {
  if (!isUnset(timeout)) checkTimeout(call, timeout);
}

}  // namespace farandole::backend
