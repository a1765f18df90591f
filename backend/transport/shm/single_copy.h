#pragma once

#include <sys/types.h>

#include <cstddef>

#include "backend/common/status.h"

namespace farandole::transport {

// Copies out of another process of the host, with no memory in between (process_vm_readv).
Status copyFromProcess(pid_t pid, std::byte* to, const std::byte* from, std::size_t bytes);

}  // namespace farandole::transport
