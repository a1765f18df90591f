#include "backend/transport/shm/wiring.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <tuple>

#include "backend/common/text.h"
#include "backend/transport/departure.h"

namespace farandole::transport {
namespace {

constexpr int kBacklog = 4096;
constexpr std::size_t kNumParts = std::tuple_size_v<HelloDescriptors>;

// An abstract name: a null byte, then "farandole-" and the token in hexadecimal.
socklen_t nameOf(const ShmToken& token, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const std::string name = std::string("\0farandole-", 11) + hexText({token.data(), token.size()});
  std::memcpy(address.sun_path, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
}

Descriptor unixSocket() { return Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

Descriptor duplicate(const Descriptor& descriptor) { return Descriptor(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0)); }

Result<ucred> credentialsOf(int socket) {
  ucred credentials = {};
  socklen_t length = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return systemError("SO_PEERCRED");
  if (credentials.uid != geteuid() && credentials.uid != 0) {
    return Status::unavailable("a process of user " + std::to_string(credentials.uid) +
                               " is at the other end; expected user " + std::to_string(geteuid()));
  }
  return credentials;
}

std::string readLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

union Control {
  std::array<char, CMSG_SPACE(kNumParts * sizeof(int))> bytes;
  cmsghdr alignment;
};

template <std::size_t kCount>
bool sendParts(int socket, const void* data, std::size_t bytes, const std::array<int, kCount>& descriptors) {
  iovec piece{const_cast<void*>(data), bytes};
  Control control = {};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = &control;
  message.msg_controllen = CMSG_SPACE(sizeof descriptors);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof descriptors);
  std::memcpy(CMSG_DATA(header), descriptors.data(), sizeof descriptors);
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

// Descriptors that did not come stay as they are.
template <std::size_t kCount>
ssize_t recvParts(int socket, void* data, std::size_t bytes, std::array<int, kCount>& descriptors) {
  iovec piece{data, bytes};
  Control control = {};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = &control;
  message.msg_controllen = CMSG_SPACE(sizeof descriptors);
  const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  const cmsghdr* const header = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    std::memcpy(descriptors.data(), CMSG_DATA(header),
                std::min<std::size_t>(sizeof descriptors, header->cmsg_len - CMSG_LEN(0)));
  }
  return got;
}

}  // namespace

Result<MeetingPoint> MeetingPoint::open() {
  MeetingPoint point;
  if (getrandom(point.token_.data(), point.token_.size(), 0) != static_cast<ssize_t>(kTokenBytes)) {
    return systemError("getrandom");
  }
  point.socket_ = unixSocket();
  if (!point.socket_) return systemError("socket(AF_UNIX)");
  sockaddr_un address;
  const socklen_t length = nameOf(point.token_, address);
  if (bind(point.descriptor(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    return systemError("binding a Unix socket");
  }
  if (listen(point.descriptor(), kBacklog) != 0) return systemError("listening on a Unix socket");
  point.spare_ = duplicate(point.socket_);
  if (!point.spare_) return systemError("fcntl(F_DUPFD_CLOEXEC)");
  return point;
}

Descriptor MeetingPoint::accept() {
  const auto acceptNext = [this] {
    return Descriptor(accept4(descriptor(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  };
  if (!spare_) spare_ = duplicate(socket_);
  Descriptor visitor = acceptNext();
  if (visitor || errno != EMFILE || !spare_) return visitor;
  spare_ = Descriptor();
  return acceptNext();
}

Result<Descriptor> introduce(const ShmToken& token, const Hello& hello, const HelloDescriptors& parts, pid_t& pid) {
  Descriptor socket = unixSocket();
  if (!socket) return systemError("socket(AF_UNIX)");
  sockaddr_un address;
  const socklen_t length = nameOf(token, address);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == ECONNREFUSED)
      return Status(StatusCode::kPeerLeft, "its process is gone: nothing listens at its address");
    return systemError("connecting to a process of this host");
  }
  Result<ucred> credentials = credentialsOf(socket.get());
  if (!credentials) return credentials.status();
  pid = credentials->pid;

  const bool hasProcess = parts.back() >= 0;
  const bool isSent = hasProcess
                          ? sendParts(socket.get(), &hello, sizeof hello, parts)
                          : sendParts(socket.get(), &hello, sizeof hello, std::array{parts[0], parts[1], parts[2]});
  if (!isSent) {
    if (errno == EPIPE || errno == ECONNRESET) return processLeft();
    return systemError("passing shared memory to a process of this host");
  }
  return socket;
}

Result<Visitor> receiveHello(int socket) {
  Visitor visitor = {};
  HelloDescriptors parts{-1, -1, -1, -1};
  const ssize_t got = recvParts(socket, &visitor.hello, sizeof visitor.hello, parts);
  if (got < 0 && errno == EAGAIN) return Status::timeout("nothing was said yet");
  visitor.parts = {Descriptor(parts[0]), Descriptor(parts[1]), Descriptor(parts[2]), Descriptor(parts[3])};
  if (got != static_cast<ssize_t>(sizeof visitor.hello) || visitor.hello.magic != kShmMagic ||
      visitor.hello.version != kShmVersion) {
    return Status::unavailable("what connected is no farandole process of this version");
  }
  Result<ucred> credentials = credentialsOf(socket);
  if (!credentials) return credentials.status();
  visitor.pid = credentials->pid;
  return visitor;
}

Status sayWord(int socket, const Word& word, int descriptor) {
  const bool said = descriptor >= 0 ? sendParts(socket, &word, sizeof word, std::array{descriptor})
                                    : ::send(socket, &word, sizeof word, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof word;
  if (said) return Status::ok();
  return errno == EPIPE || errno == ECONNRESET ? processLeft() : systemError("writing to a process of this host");
}

ssize_t hearWord(int socket, Word& word, Descriptor& descriptor) {
  std::array<int, 1> passed{-1};
  ssize_t got = recvParts(socket, &word, sizeof word, passed);
  // Who has closed it without reading all is told first, what it had said before comes after that.
  if (got < 0 && errno == ECONNRESET) got = recvParts(socket, &word, sizeof word, passed);
  descriptor = Descriptor(passed[0]);
  return got;
}

std::string hostIdentity() {
  if (const char* given = std::getenv("FARANDOLE_HOST_ID")) return given;
  struct stat network = {};
  stat("/proc/self/ns/net", &network);
  return readLine("/proc/sys/kernel/random/boot_id") + "/" + std::to_string(network.st_ino);
}

Descriptor watchProcess(pid_t pid) {
#ifdef SYS_pidfd_open
  return pid > 0 ? Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) : Descriptor();
#else
  return Descriptor();
#endif
}

}  // namespace farandole::transport
