#include "backend/transport/shm/single_copy.h"

#include <sys/uio.h>

#include <cerrno>
#include <string>
#include <system_error>

namespace farandole::transport {

Status copyFromProcess(pid_t pid, std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const iovec local{to + done, bytes - done};
    const iovec remote{const_cast<std::byte*>(from) + done, bytes - done};
    const ssize_t copied = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (copied > 0) {
      done += static_cast<std::size_t>(copied);
    } else if (copied == 0 || errno != EINTR) {
      const int error = copied == 0 ? EFAULT : errno;
      std::string text = "process_vm_readv: " + std::generic_category().message(error);
      if (error == EFAULT) {
        text += " (memory that other processes cannot read; FARANDOLE_SHM_SINGLE_COPY=off copies it in between)";
      }
      return Status(error == ESRCH ? StatusCode::kPeerFailed : StatusCode::kInternal, text);
    }
  }
  return Status::ok();
}

}  // namespace farandole::transport
