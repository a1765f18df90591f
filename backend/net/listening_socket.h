#pragma once

#include "backend/common/status.h"
#include "backend/net/control_address.h"

namespace farandole::net {

// A socket that listens on an ephemeral port, and what others need to reach it.
struct ListeningSocket {
  int descriptor = -1;  // guarded (fork_guard.h); the caller's
  ControlAddress address;
};

// On all interfaces, IPv4 and IPv6; or only on FARANDOLE_CONTROL_HOST (an
// address or name of this host), or on the first address of the interface that
// FARANDOLE_SOCKET_IFNAME names.
Result<ListeningSocket> openListeningSocket();

}  // namespace farandole::net
