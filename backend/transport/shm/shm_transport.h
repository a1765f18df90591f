#pragma once

#include <sys/types.h>

#include <bitset>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/transport/matcher.h"
#include "backend/transport/shm/memory.h"
#include "backend/transport/shm/ring.h"
#include "backend/transport/shm/wiring.h"
#include "backend/transport/transport.h"
#include "backend/transport/unexpected_bytes.h"

namespace farandole::transport {

struct ShmOptions {
  // Of each direction between two processes that talk, for messages that are on their way.
  std::uint32_t ringBytes = 128 << 10;
  // Whether large messages are copied once, from process to process, where the system allows it: never, while their
  // sender does something else, at once, or at once where that is cheap.
  enum class SingleCopy : std::uint8_t { kOff, kLazy, kEager, kAuto };
  SingleCopy singleCopy = SingleCopy::kAuto;
  // Of each peer.
  std::size_t unexpectedBytes = kUnexpectedBytes;

  // FARANDOLE_SHM_RING_BYTES, FARANDOLE_SHM_SINGLE_COPY, FARANDOLE_UNEXPECTED_BYTES.
  static Result<ShmOptions> fromEnvironment();
};

// Messages between the processes of one host. Small ones go through a ring in
// shared memory, one for each direction between two processes. Large ones stay
// where they are until a receive wants them. Then the sender, when it is at hand,
// puts them into the ring piece by piece; when it is not, or where that is cheap, the
// receiver copies them out of its memory, where processes may read each other's.
// So do small ones of a peer of whom this process keeps enough that no receive has
// wanted yet: what is said of them goes through the ring as ever, so that a receive
// that is posted finds its message, whatever was sent before it.
//
// A peer's death is seen by its pidfd and its socket.
class ShmTransport final : public Transport {
 public:
  // Fails with kUnavailable where the system lacks what is needed; the message says what.
  static Result<std::unique_ptr<Transport>> create(const ShmOptions& options);
  ~ShmTransport() override;

  std::string_view name() const override { return "shm"; }
  std::string address() const override;
  Result<PeerId> connect(std::string_view address) override;
  Status failure(PeerId peer) const override { return links_[static_cast<std::uint32_t>(peer)].failure; }
  void onPeerFailed(PeerFailed handler) override { peerFailed_ = std::move(handler); }
  void send(PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes, Request& request) override;
  void recv(PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
            Request& request) override;
  bool recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes, Request& request) override;
  void cancel(Request& request) override;
  void watchWaiter(const bool& hasWaiter) override { hasWaiter_ = &hasWaiter; }
  bool progress() override;
  bool progressAgain() override;
  int eventFd() const override { return epoll_.get(); }
  bool arm() override;
  Status shareMemory(PeerId peer, std::uint64_t key, int descriptor) override;
  Result<Descriptor> takeSharedMemory(PeerId peer, std::uint64_t key) override;
  Reading reading(PeerId peer) const override { return links_[static_cast<std::uint32_t>(peer)].reading; }
  Status readMemory(PeerId peer, void* to, const void* from, std::size_t bytes) override;
  void nudge(PeerId peer) override { ring(links_[static_cast<std::uint32_t>(peer)]); }
  void leave() override;
  void closeGroup(std::uint32_t group, const std::vector<std::string_view>& members) override;
  void openGroup(std::uint32_t group) override;
  void signal() override;
  std::string describe(PeerId peer) const override;

 private:
  // What waits for room in a ring. Without a request it is a word to the peer.
  struct Queued {
    CellFields fields;
    const std::byte* data = nullptr;
    Request* request = nullptr;
  };

  struct Link {
    std::uint32_t id = 0;
    ShmToken token{};
    bool isSelf = false;
    pid_t pid = 0;
    Reading reading = Reading::kUnknown;  // of the peer's memory
    bool saidGoodbye = false;
    bool isGone = false;
    Status reason;  // of its end, when that is neither a farewell nor a death
    Status failure;

    // To the peer.
    SharedMemory out;
    RingWriter writer;
    Descriptor outSocket;
    std::deque<Queued> backlog;
    std::uint32_t freeSlots = (1u << kTransferSlots) - 1;
    PullWays pullWays;

    // From the peer.
    SharedMemory in;
    RingReader reader;
    Descriptor inSocket;
    SharedMemory doorMemory;
    std::size_t kept = 0;     // bytes of messages that no receive has wanted yet
    bool isHeldBack = false;  // further ones are to stay with the peer
    Door* door = nullptr;
    Descriptor bell;
    Descriptor process;
  };

  // A large message that this process sends, until the receiver has it.
  struct Outgoing {
    Request* request = nullptr;  // null: the entry is free
    Link* link = nullptr;
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::uint32_t id = 0;  // its place in outgoing_
    std::uint16_t slot = kNoSlot;
    std::uint32_t pull = 0;    // the receiver's number for it
    std::size_t streamed = 0;  // by this side alone
    bool isStreamed = false;
  };

  // A large message that this process receives.
  struct Pull {
    Request* request = nullptr;  // null: the entry is free
    Link* link = nullptr;
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
    std::size_t come = 0;  // bytes
    std::uint32_t id = 0;
    std::uint16_t slot = kNoSlot;
    bool isStreamed = false;  // by the sender alone
    bool isOver = false;      // the sender's process has ended: how, its link will tell, and end this with that
    bool isEager = false;     // this side copies, too, without waiting for the sender
    bool isMeasured = false;  // since it was begun
    std::chrono::steady_clock::time_point begun{};
    int patience = 0;  // else: empty calls, before it does
    Status failure{};  // of this side's copying
  };

  // What a receive that failed with kMismatch wanted, for its sender.
  struct Wanted {
    std::uint64_t tag;
    std::uint64_t bytes;
  };

  explicit ShmTransport(const ShmOptions& options);
  Status open();

  // Connecting, and what descriptors tell (shm_links.cc).
  enum class Source : std::uint8_t { kBell, kMeetingPoint, kVisitor, kOutSocket, kInSocket, kProcess };
  Link& linkTo(const ShmToken& token);
  Status callOn(Link& link);
  // Unless it is watched already. `process` may be none.
  Status awaitEndOf(Link& link, Descriptor process);
  Reading tryReading(const Visitor& visitor) const;
  Status watch(int descriptor, Source source, std::uint32_t index);
  bool pollDescriptors();
  bool acceptVisitors();
  void welcome(std::uint32_t index);
  void settle(Visitor visitor, Descriptor socket);
  // By what a visitor has passed.
  Status connectBack(Link& link, Visitor visitor);
  void hear(Link& link, Descriptor& socket);
  void noteGone(Link& link, Status reason = Status::ok());
  void failGone();
  void fail(Link& link);
  void wake(Link& link);
  void wakeWaiter(Link& link);
  static void ring(Link& link);

  // Messages.
  void deliver(Request& request, std::uint64_t tag, const std::byte* data, std::size_t bytes);
  void accept(Request& request, std::unique_ptr<Unexpected> message);
  void arrive(Link& link, std::uint64_t tag, const std::byte* data, std::size_t bytes);
  bool isClosed(std::uint64_t tag) const { return closedGroups_[p2p::groupOf(tag)]; }
  void dropMessage(const Unexpected& message);
  void keep(Link& link, std::size_t bytes);
  void noteTaken(Link& link, std::size_t bytes);
  void holdBack(Link& link, bool holds);
  void sendToSelf(Link& link, std::uint64_t tag, const std::byte* data, std::size_t bytes, Request& request);
  void post(Link& link, const Queued& item);
  void enqueue(Link& link, const Queued& item);
  static bool write(Link& link, const Queued& item);
  void tell(Link& link, CellKind kind, std::uint32_t id, std::uint64_t tag = 0);
  void tellFinished(Link& link, std::uint32_t id, StatusCode code, Wanted wanted = {});
  bool drain(Link& link);
  void receiveEager(Link& link, const Cell& cell);
  // A message that has come along with its offer, for a receive that waits.
  void receiveCarried(Link& link, const Cell& cell, Request& receive);
  void handle(Link& link, const Cell& cell);
  bool flush(Link& link);
  bool flushBacklogs();
  void tellReceived();

  // Large messages (shm_rendezvous.cc).
  Queued makeOffer(Link& link, std::uint64_t tag, const std::byte* data, std::size_t bytes, Request& request);
  void offer(Link& link, std::uint64_t tag, const std::byte* data, std::size_t bytes, Request& request);
  void pull(Link& link, Request& request, const Unexpected& message);
  bool advancePulls();
  bool advance(Pull& pull);
  void noteCome(Pull& pull, std::size_t bytes);
  void finish(Pull& pull, Status status);
  void receiveFragment(Link& link, const Cell& cell);
  bool helpSends(bool again);
  static std::size_t nextToStream(Outgoing& outgoing);
  bool stream(Outgoing& outgoing, bool again);
  void finishOutgoing(Link& link, std::uint32_t id, StatusCode code, Wanted wanted = {});
  Request* release(Outgoing& outgoing);
  bool isWorkLeft() const;
  bool isAtHand() const { return hasWaiter_ == nullptr || *hasWaiter_; }

  const ShmOptions options_;
  const RingShape shape_;
  std::vector<std::byte> probe_;  // for others to read
  MeetingPoint meetingPoint_;
  SharedMemory doorMemory_;
  Door* door_ = nullptr;
  Descriptor process_;  // this one, for its peers to watch; none where the kernel has no such
  Descriptor bell_;
  Descriptor epoll_;
  PeerFailed peerFailed_;
  const bool* hasWaiter_ = nullptr;  // or whether it waits is not known
  bool asleep_ = false;
  int callsSinceLook_ = 0;

  std::deque<Link> links_;  // by PeerId
  std::map<ShmToken, std::uint32_t> byToken_;
  std::vector<Link*> incoming_;  // with a ring to read
  std::vector<Descriptor> visitors_;
  std::vector<Link*> gone_;
  bool hasLeft_ = false;
  std::map<std::pair<std::uint32_t, std::uint64_t>, Descriptor> passed_;  // by link and key
  std::size_t numBacklogged_ = 0;

  Matcher matcher_;
  std::bitset<p2p::kMaxGroups> closedGroups_;
  std::deque<Outgoing> outgoing_;
  std::vector<std::uint32_t> freeOutgoing_;
  std::vector<std::uint32_t> helped_;  // outgoing that this side puts into the ring, once they are wanted
  std::deque<Pull> pulls_;
  std::vector<std::uint32_t> freePulls_;
  int numEager_ = 0;  // of those under way
};

}  // namespace farandole::transport
