#pragma once

#include <c10/util/Exception.h>

#include "backend/common/status.h"

namespace farandole::backend {

// Throws for anything but ok: ValueError for misuse, DistBackendError for the rest.
inline void throwIfError(const Status& status) {
  if (status.isOk()) return;
  const bool isMisuse = status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kMismatch;
  TORCH_CHECK_VALUE(!isMisuse, "farandole: ", status.toString());
  C10_THROW_ERROR(DistBackendError, "farandole: " + status.toString());
}

}  // namespace farandole::backend
