#include "backend/transport/shm/single_copy.h"

#include <sys/uio.h>

#include <cerrno>
#include <string>
#include <system_error>

namespace farandole::transport {
namespace {

template <typename Call>
Status copyAll(const char* what, const Call& call, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t copied = call(done);
    if (copied > 0) {
      done += static_cast<std::size_t>(copied);
    } else if (copied == 0 || errno != EINTR) {
      const int error = copied == 0 ? EFAULT : errno;
      return Status(error == ESRCH ? StatusCode::kPeerFailed : StatusCode::kInternal,
                    std::string(what) + ": " + std::generic_category().message(error));
    }
  }
  return Status::ok();
}

}  // namespace

Status copyFromProcess(pid_t pid, std::byte* to, const std::byte* from, std::size_t bytes) {
  const auto read = [&](std::size_t done) {
    const iovec local{to + done, bytes - done};
    const iovec remote{const_cast<std::byte*>(from) + done, bytes - done};
    return process_vm_readv(pid, &local, 1, &remote, 1, 0);
  };
  return copyAll("process_vm_readv", read, bytes);
}

Status copyToProcess(pid_t pid, std::byte* to, const std::byte* from, std::size_t bytes) {
  const auto write = [&](std::size_t done) {
    const iovec local{const_cast<std::byte*>(from) + done, bytes - done};
    const iovec remote{to + done, bytes - done};
    return process_vm_writev(pid, &local, 1, &remote, 1, 0);
  };
  return copyAll("process_vm_writev", write, bytes);
}

}  // namespace farandole::transport
