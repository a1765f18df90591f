#include "backend/common/status.h"

namespace farandole {

std::string_view toString(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return "ok";
    case StatusCode::kInvalidArgument: return "invalid argument";
    case StatusCode::kMismatch: return "mismatch";
    case StatusCode::kTimeout: return "timeout";
    case StatusCode::kAborted: return "aborted";
    case StatusCode::kPeerFailed: return "peer failed";
    case StatusCode::kPeerLeft: return "peer left";
    case StatusCode::kUnavailable: return "unavailable";
    case StatusCode::kInternal: return "internal";
  }
  return "unknown";
}

Status::Status(StatusCode code, std::string message)
    : rep_(std::make_shared<Rep>(Rep{code, std::move(message), nullptr})) {
  assert(code != StatusCode::kOk);
}

Status Status::wrap(std::string context) const {
  assert(!isOk());
  Status outer;
  outer.rep_ = std::make_shared<Rep>(Rep{code(), std::move(context), rep_});
  return outer;
}

std::string Status::toString() const {
  if (isOk()) return "ok";
  std::string text;
  for (const Rep* rep = rep_.get(); rep != nullptr; rep = rep->cause.get()) {
    if (!text.empty()) text += ": ";
    text += rep->message;
  }
  return text;
}

}  // namespace farandole
