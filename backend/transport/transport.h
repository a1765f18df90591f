#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/common/status.h"
#include "backend/transport/descriptor.h"
#include "backend/transport/request.h"

namespace farandole::transport {

// A peer that a Transport is connected to.
enum class PeerId : std::uint32_t {};
inline constexpr PeerId kAnyPeer{0xffffffff};

// How this process reads a peer's memory, from the worst to the best.
enum class Reading : std::uint8_t {
  kUnknown,  // the peer has not been heard of
  kNone,
  kDear,   // the kernel's work for each page costs more than to copy it once more
  kCheap,  // it costs less
};
inline bool canRead(Reading reading) { return reading >= Reading::kDear; }

// Moves tagged messages between processes. Messages between two peers with tags
// that match the same receive are received in the order in which they were sent.
//
// A receive and the message that it matches must agree on the bytes and on the
// element in the tag (p2p/message_tag.h). Else both are used up: the receive fails
// with kMismatch, its buffer holding anything, and so does the send if it has not
// completed by then, and if the transport's receiver answers: not over UCX.
//
// Thread: one at a time (see ProgressEngine), except eventFd() and signal().
// Errors of a message are in its Request; they never throw.
class Transport {
 public:
  using PeerFailed = std::function<void(PeerId, const Status&)>;

  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;

  // What peers pass to connect().
  virtual std::string address() const = 0;
  virtual Result<PeerId> connect(std::string_view address) = 0;
  // Ok, or how the peer failed: sends fail, what it had sent can still be received.
  virtual Status failure(PeerId peer) const = 0;
  // Runs inside progress() when a peer's process or connection is found broken; not while the transport is destroyed.
  virtual void onPeerFailed(PeerFailed handler) = 0;
  // For who knows from elsewhere that the peer is dead or out of reach, also where the transport has not found out and
  // may not for long: what is under way with it ends with an error, now or in a later progress(), and lets go of what
  // it holds. The handler runs with `why`, unless it has run. Not from a callback.
  virtual void drop(PeerId, const Status&) {}

  virtual void send(PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes, Request& request) = 0;
  // Matches the oldest message whose tag equals `tag` in the bits of `mask`. The
  // tag alone decides; `from` says which peer it can come from, or kAnyPeer. A mask
  // with the element's bits is for tags that always come with the same element.
  virtual void recv(PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                    Request& request) = 0;
  // The same, but only when such a message is there already; false, and nothing is
  // posted, when there is none.
  virtual bool recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes, Request& request) = 0;
  // For who received from any peer, once it knows from whom the bytes came: their sender may wait for that.
  virtual void noteReceived(PeerId, std::size_t) {}
  // The request completes with kAborted, now or in a later progress(), unless it
  // completes by itself before. A send that the peer may be reading cannot be
  // cancelled: it completes when the peer is done or has failed. A receive of which a part has come may complete with
  // the rest, or once its peer has failed (Request::keep).
  virtual void cancel(Request& request) = 0;

  // Where it stands whether a thread waits, and progresses this for want of anything better: it may then do for a peer
  // what that could do itself. Nobody is taken for busy before this is called.
  virtual void watchWaiter(const bool&) {}

  // Advances everything that can be; true when something happened.
  virtual bool progress() = 0;
  // The same for who calls it again at once: what is slow to look at is not looked at each time.
  virtual bool progressAgain() { return progress(); }

  // Sleeping: when arm() returns true, eventFd() becomes readable at the next
  // event; when it returns false there is work: call progress() first.
  virtual int eventFd() const = 0;
  virtual bool arm() = 0;
  // Passes a descriptor of memory to a peer of this host, who finds it under `key`.
  virtual Status shareMemory(PeerId peer, std::uint64_t key, int descriptor);
  // What a peer has passed; a closed descriptor while it has not. An error when this process had no room for it.
  virtual Result<Descriptor> takeSharedMemory(PeerId peer, std::uint64_t key);
  virtual Reading reading(PeerId) const { return Reading::kNone; }
  // Copies from where the peer said that it has something, unless there is no reading it. kPeerFailed when its process
  // has ended.
  virtual Status readMemory(PeerId peer, void* to, const void* from, std::size_t bytes);
  // Wakes the peer up if it sleeps: shared memory was written, and a full fence passed.
  virtual void nudge(PeerId) {}

  // Tells the peers that this process leaves in order: its end is no failure of theirs, and what becomes of them is
  // told nobody here from now on. Destroying the transport does it too.
  virtual void leave() = 0;

  // Makes eventFd() readable. Any thread.
  virtual void signal() = 0;

  // The group of this number (p2p/message_tag.h) is over: what has come for it and was not received is dropped, and so
  // is what still comes, until the number is opened again. A send that waits for its receive there ends: with
  // kPeerLeft where the receiver answers, and then of point-to-point messages only; else as if it had been received.
  // `members`: their addresses by their rank in the group. This process need not be connected to them.
  virtual void closeGroup(std::uint32_t, const std::vector<std::string_view>&) {}
  // Before others are told this number for a group; all are open at first. Nothing is left of what came for it before.
  virtual void openGroup(std::uint32_t) {}

  // Some times a second: ends what has been waited for long enough.
  virtual void look(std::chrono::steady_clock::time_point) {}

  // What carries messages to this peer, for people: "ucx: tcp/eth0".
  virtual std::string describe(PeerId peer) const = 0;
};

}  // namespace farandole::transport
