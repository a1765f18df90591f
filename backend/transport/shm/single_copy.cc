#include "backend/transport/shm/single_copy.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <system_error>
#include <vector>

#include "backend/transport/shm/mapping.h"

namespace farandole::transport {
namespace {

// Of these the shortest counts, which other programs do not change.
constexpr int kTries = 5;
constexpr int kPages = kProbeBytes / 4096;
// What the kernel may take for a page beyond copying it: between two machines. One takes 0.12 to 0.19 us, beside busy
// programs too, and exchanges of 1 to 16 MiB take a quarter to a half less time when both read; another takes 0.8, and
// a third more.
constexpr std::chrono::nanoseconds kCheapPage{350};

}  // namespace

Status copyFromProcess(pid_t pid, std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const iovec local{to + done, bytes - done};
    const iovec remote{const_cast<std::byte*>(from) + done, bytes - done};
    const ssize_t copied = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (copied > 0) {
      noteRead(pid, from + done, static_cast<std::size_t>(copied));
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

ReadingTrial tryToRead(pid_t pid, const std::byte* from) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::byte> read(kProbeBytes);
  std::vector<std::byte> copied(kProbeBytes);
  Clock::duration reading = Clock::duration::max();
  Clock::duration copying = Clock::duration::max();
  for (int i = 0; i < kTries; ++i) {
    const auto start = Clock::now();
    if (!copyFromProcess(pid, read.data(), from, kProbeBytes)) return {};
    const auto middle = Clock::now();
    std::memcpy(copied.data(), read.data(), kProbeBytes);
    asm volatile("" : : "r"(copied.data()) : "memory");  // or it would be left out
    reading = std::min(reading, middle - start);
    copying = std::min(copying, Clock::now() - middle);
  }
  return {wordOf(read.data()), (reading - copying) / kPages < kCheapPage};
}

}  // namespace farandole::transport
