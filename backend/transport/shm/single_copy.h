#pragma once

#include <sys/types.h>

#include <cstddef>

#include "backend/common/status.h"

namespace farandole::transport {

// Copies between this process and another one of the host, with no memory in
// between (process_vm_readv and its sister).
Status copyFromProcess(pid_t pid, std::byte* to, const std::byte* from, std::size_t bytes);
Status copyToProcess(pid_t pid, std::byte* to, const std::byte* from, std::size_t bytes);

}  // namespace farandole::transport
