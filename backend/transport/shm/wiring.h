#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "backend/transport/shm/memory.h"
#include "backend/transport/shm/ring.h"

namespace farandole::transport {

// How a sleeping process is woken up: each has one, and passes it to its peers.
struct Door {
  // Its owner sleeps, or is about to: kAsleep, or kAsleepWaiting when that is a thread that waits; else 0.
  std::atomic<std::uint32_t> armed;
};
inline constexpr std::uint32_t kAsleep = 1;
inline constexpr std::uint32_t kAsleepWaiting = 2;

inline constexpr std::size_t kTokenBytes = 16;
// Names a process among those of its host; random, so that nobody meets it by accident.
using ShmToken = std::array<char, kTokenBytes>;

// What a process says to one that it wants to send to.
struct Hello {
  std::uint32_t magic = 0;
  std::uint32_t version = 0;
  ShmToken token{};  // the sender's
  RingShape ring{};
  // kProbeBytes of the sender's memory, for the receiver to try whether it can read there, and the first word of them.
  std::uint64_t probe = 0;
  const std::byte* probeAddress = nullptr;
};

// What comes with it.
struct HelloParts {
  Descriptor door;  // memory that holds a Door
  Descriptor bell;  // the eventfd to ring when that is armed
  Descriptor ring;  // memory of the direction from the sender to the receiver
  // Becomes readable when the sender's process ends, also where the receiver is in another namespace of process ids;
  // none where the sender's kernel has no such.
  Descriptor process;
};

// A connection that was accepted.
struct Visitor {
  Hello hello;
  HelloParts parts;  // closed where this process has no descriptors left, the last one first
  pid_t pid;         // in our namespace; 0 when it is not visible there
};

// Where processes of a host find each other: a Unix socket with an abstract
// name, which ends with its process and is seen in its network namespace only.
class MeetingPoint {
 public:
  MeetingPoint() = default;
  static Result<MeetingPoint> open();

  const ShmToken& token() const { return token_; }
  int descriptor() const { return socket_.get(); }
  // A connection whose hello has not been read; none when nobody is waiting.
  Descriptor accept();

 private:
  ShmToken token_{};
  Descriptor socket_;
  Descriptor spare_;  // given up for a visitor when this process has no descriptors left: it is to be told
};

// The descriptors of HelloParts, in its order; the last one may be -1.
using HelloDescriptors = std::array<int, 4>;

// Connects to the meeting point of `token` and says hello. `pid` is the peer's.
Result<Descriptor> introduce(const ShmToken& token, const Hello& hello, const HelloDescriptors& parts, pid_t& pid);
// Reads a hello; kTimeout when it has not come yet. Refuses other users and other versions.
Result<Visitor> receiveHello(int socket);

// A short message on a connection, and a descriptor that may come with it.
struct Word {
  char what = 0;
  std::uint64_t key = 0;
};
Status sayWord(int socket, const Word& word, int descriptor = -1);
// Bytes that were read, as recvmsg. A closed descriptor where this process has none left.
ssize_t hearWord(int socket, Word& word, Descriptor& descriptor);

// The same for all processes that can reach each other's meeting points, and for
// no other: the machine and its network namespace. FARANDOLE_HOST_ID overrides it.
std::string hostIdentity();

// A descriptor that becomes readable when the process ends; none where the
// kernel or the namespace does not allow it.
Descriptor watchProcess(pid_t pid);

inline constexpr std::uint32_t kShmMagic = 0x6661726e;
inline constexpr std::uint32_t kShmVersion = 6;

}  // namespace farandole::transport
