#pragma once

#include <c10/util/Exception.h>

#include <exception>

#include "backend/common/status.h"

namespace farandole::backend {

// Throws for anything but ok: ValueError for misuse, DistBackendError for the rest.
inline void throwIfError(const Status& status) {
  if (status.isOk()) return;
  const bool isMisuse = status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kMismatch;
  TORCH_CHECK_VALUE(!isMisuse, "farandole: ", status.toString());
  C10_THROW_ERROR(DistBackendError, "farandole: " + status.toString());
}

// What throwIfError() throws; null for ok.
inline std::exception_ptr exceptionOf(const Status& status) {
  try {
    throwIfError(status);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace farandole::backend
