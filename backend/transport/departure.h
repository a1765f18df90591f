#pragma once

#include "backend/common/status.h"

namespace farandole::transport {

// Whether a peer is gone, in whatever way.
inline bool isGone(const Status& status) {
  return status.code() == StatusCode::kPeerLeft || status.code() == StatusCode::kPeerFailed;
}

// Of a peer that has left in order, however that is known.
inline Status processLeft() {
  return {StatusCode::kPeerLeft, "its process has left: it destroyed its groups, or exited"};
}

}  // namespace farandole::transport
