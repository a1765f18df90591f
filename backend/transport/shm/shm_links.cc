// How processes find each other, wake each other up, and notice each other's end.
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "backend/transport/departure.h"
#include "backend/transport/shm/shm_transport.h"
#include "backend/transport/shm/single_copy.h"

namespace farandole::transport {
namespace {

constexpr char kGoodbye = 'b';
constexpr char kKnock = 'k';
constexpr char kMemory = 'm';
constexpr char kRefusal = 'r';
constexpr std::string_view kAddressPrefix = "shm:";
// So long a process that leaves waits for room, and so often it looks.
constexpr std::chrono::seconds kPatience{2};
constexpr std::chrono::microseconds kLook{200};

void drainEvents(int descriptor) {
  std::uint64_t count;
  [[maybe_unused]] const auto n = read(descriptor, &count, sizeof count);
}

Status noDescriptorsLeft() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  return Status::unavailable("this process had no file descriptors left for it (ulimit -n allows " +
                             std::to_string(limit.rlim_cur) + ")");
}

Status refused() {
  return {StatusCode::kPeerLeft,
          "its process could not connect to this one, for want of file descriptors or memory there"};
}

// Of a descriptor that watches a process.
bool hasEnded(int process) {
  pollfd end{process, POLLIN, 0};
  return poll(&end, 1, 0) > 0;
}

// Whether it can be heard is the peer's affair.
void say(const Descriptor& socket, char what) {
  if (socket) (void)sayWord(socket.get(), {what});
}

}  // namespace

Status ShmTransport::open() {
  Result<MeetingPoint> point = MeetingPoint::open();
  if (!point) return point.status();
  meetingPoint_ = std::move(point).value();
  Result<SharedMemory> memory = SharedMemory::create("farandole-door", sizeof(Door));
  if (!memory) return memory.status();
  doorMemory_ = std::move(memory).value();
  door_ = reinterpret_cast<Door*>(doorMemory_.data());
  process_ = watchProcess(getpid());
  bell_ = Descriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!bell_) return systemError("eventfd");
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return systemError("epoll_create1");
  // All of it random: what nobody has written to would be one page of zeros.
  probe_.resize(kProbeBytes);
  for (std::size_t done = 0; done < kProbeBytes;) {
    const ssize_t got = getrandom(probe_.data() + done, kProbeBytes - done, 0);
    if (got < 0 && errno != EINTR) return systemError("getrandom");
    done += static_cast<std::size_t>(std::max<ssize_t>(got, 0));
  }
  FARANDOLE_RETURN_IF_ERROR(watch(bell_.get(), Source::kBell, 0));
  return watch(meetingPoint_.descriptor(), Source::kMeetingPoint, 0);
}

ShmTransport::~ShmTransport() { leave(); }

void ShmTransport::leave() {
  if (!hasLeft_) tellReceived();
  hasLeft_ = true;
  for (const Link& link : links_) {
    say(link.outSocket, kGoodbye);
    say(link.inSocket, kGoodbye);
  }
}

// Who has sent waits for word of it, for which there may be no room yet: it may have had no turn for long.
void ShmTransport::tellReceived() {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (numBacklogged_ > 0) {
    bool isRoomAwaited = false;
    for (Link& link : links_) {
      if (!link.failure || link.isGone || hasEnded(link.process.get())) continue;
      bool isFull = false;
      // Past what else waits here, of which nobody is to be told any more.
      numBacklogged_ -= std::erase_if(link.backlog, [&](const Queued& queued) {
        if (isFull || queued.fields.kind != CellKind::kFinished) return false;
        isFull = !write(link, queued);
        return !isFull;
      });
      wake(link);
      isRoomAwaited |= isFull;
    }
    if (!isRoomAwaited || std::chrono::steady_clock::now() > end) return;
    std::this_thread::sleep_for(kLook);
  }
}

std::string ShmTransport::address() const {
  return std::string(kAddressPrefix) + std::string(meetingPoint_.token().data(), kTokenBytes);
}

Result<PeerId> ShmTransport::connect(std::string_view address) {
  if (!address.starts_with(kAddressPrefix) || address.size() != kAddressPrefix.size() + kTokenBytes) {
    return Status::invalidArgument("the address of " + std::to_string(address.size()) +
                                   " bytes is none of shared memory");
  }
  ShmToken token;
  std::memcpy(token.data(), address.data() + kAddressPrefix.size(), kTokenBytes);
  acceptVisitors();  // it may have come, and gone, already
  Link& link = linkTo(token);
  const Status called = callOn(link);
  if (isGone(called)) {
    // What it sent before can still be received.
    link.failure = called;
    noteGone(link);
  } else if (!called) {
    return called;
  }
  return PeerId{link.id};
}

ShmTransport::Link& ShmTransport::linkTo(const ShmToken& token) {
  const auto [known, isNew] = byToken_.try_emplace(token, static_cast<std::uint32_t>(links_.size()));
  if (!isNew) return links_[known->second];
  Link& link = links_.emplace_back();
  link.id = known->second;
  link.token = token;
  link.isSelf = token == meetingPoint_.token();
  return link;
}

// Gives the peer a ring to read and says hello, once. It can be written to at once.
Status ShmTransport::callOn(Link& link) {
  if (link.outSocket || link.isSelf) return Status::ok();
  FARANDOLE_RETURN_IF_ERROR(link.failure);
  Result<SharedMemory> ring = SharedMemory::create("farandole-ring", ringBytes(shape_));
  if (!ring) return ring.status();
  const Hello hello{kShmMagic, kShmVersion, meetingPoint_.token(), shape_, wordOf(probe_.data()), probe_.data()};
  pid_t pid = 0;
  Result<Descriptor> socket =
      introduce(link.token, hello, {doorMemory_.descriptor(), bell_.get(), ring->descriptor(), process_.get()}, pid);
  if (!socket) return socket.status();
  link.out = std::move(ring).value();
  link.out.closeDescriptor();
  link.writer = RingWriter(link.out.data(), shape_);
  link.outSocket = std::move(socket).value();
  link.pid = pid;
  if (!link.process) FARANDOLE_RETURN_IF_ERROR(awaitEndOf(link, watchProcess(pid)));
  return watch(link.outSocket.get(), Source::kOutSocket, link.id);
}

Status ShmTransport::awaitEndOf(Link& link, Descriptor process) {
  if (link.process || !process) return Status::ok();
  link.process = std::move(process);
  return watch(link.process.get(), Source::kProcess, link.id);
}

Status ShmTransport::watch(int descriptor, Source source, std::uint32_t index) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = std::uint64_t{index} << 8 | static_cast<std::uint64_t>(source);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) return systemError("epoll_ctl");
  return Status::ok();
}

bool ShmTransport::pollDescriptors() {
  callsSinceLook_ = 0;
  if (asleep_) {
    asleep_ = false;
    door_->armed.store(0, std::memory_order_relaxed);
  }
  std::array<epoll_event, 32> events;
  const int count = epoll_wait(epoll_.get(), events.data(), events.size(), 0);
  bool any = false;
  for (int i = 0; i < count; ++i) {
    const auto source = static_cast<Source>(events[i].data.u64 & 0xff);
    const auto index = static_cast<std::uint32_t>(events[i].data.u64 >> 8);
    switch (source) {
      case Source::kBell: drainEvents(bell_.get()); break;
      case Source::kMeetingPoint:
        // Where no descriptors are left a visitor may stand outside for long: that is nothing to go on with.
        any |= acceptVisitors();
        continue;
      case Source::kVisitor: welcome(index); break;
      case Source::kOutSocket: hear(links_[index], links_[index].outSocket); break;
      case Source::kInSocket: hear(links_[index], links_[index].inSocket); break;
      case Source::kProcess:
        links_[index].process = Descriptor();  // it would stay readable
        noteGone(links_[index]);
        break;
    }
    any = true;
  }
  return any;
}

bool ShmTransport::acceptVisitors() {
  bool any = false;
  while (Descriptor socket = meetingPoint_.accept()) {
    const auto index = static_cast<std::uint32_t>(visitors_.size());
    visitors_.push_back(std::move(socket));
    if (!watch(visitors_[index].get(), Source::kVisitor, index)) visitors_[index] = Descriptor();
    welcome(index);
    any = true;
  }
  return any;
}

void ShmTransport::welcome(std::uint32_t index) {
  if (!visitors_[index]) return;
  Result<Visitor> visitor = receiveHello(visitors_[index].get());
  if (!visitor && visitor.status().code() == StatusCode::kTimeout) return;
  Descriptor socket = std::move(visitors_[index]);
  if (!visitor) return;  // a stranger: closed
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket.get(), nullptr);
  settle(std::move(*visitor), std::move(socket));
}

void ShmTransport::settle(Visitor visitor, Descriptor socket) {
  Link& link = linkTo(visitor.hello.token);
  if (link.inSocket || link.isSelf || !link.failure) return;
  link.inSocket = std::move(socket);
  const Status status = connectBack(link, std::move(visitor));
  if (status) return wake(link);
  if (isGone(status)) return noteGone(link);
  say(link.inSocket, kRefusal);
  say(link.outSocket, kRefusal);
  noteGone(link, status);
}

Status ShmTransport::connectBack(Link& link, Visitor visitor) {
  if (!visitor.parts.ring) return noDescriptorsLeft();  // the last of them
  const RingShape shape = visitor.hello.ring;
  Result<SharedMemory> ring = SharedMemory::open(std::move(visitor.parts.ring), ringBytes(shape));
  if (!ring) return ring.status();
  Result<SharedMemory> door = SharedMemory::open(std::move(visitor.parts.door), sizeof(Door));
  if (!door) return door.status();
  FARANDOLE_RETURN_IF_ERROR(watch(link.inSocket.get(), Source::kInSocket, link.id));
  link.in = std::move(ring).value();
  link.in.closeDescriptor();
  link.reader = RingReader(link.in.data(), shape);
  link.doorMemory = std::move(door).value();
  link.doorMemory.closeDescriptor();
  link.bell = std::move(visitor.parts.bell);
  FARANDOLE_RETURN_IF_ERROR(awaitEndOf(link, std::move(visitor.parts.process)));
  link.pid = visitor.pid;
  link.reading = tryReading(visitor);
  incoming_.push_back(&link);
  // Answers to its large messages go the other way.
  FARANDOLE_RETURN_IF_ERROR(callOn(link));
  link.door = reinterpret_cast<Door*>(link.doorMemory.data());
  return Status::ok();
}

Reading ShmTransport::tryReading(const Visitor& visitor) const {
  using SingleCopy = ShmOptions::SingleCopy;
  if (options_.singleCopy == SingleCopy::kOff || visitor.pid <= 0) return Reading::kNone;
  const ReadingTrial trial = tryToRead(visitor.pid, visitor.hello.probeAddress);
  if (trial.firstWord != visitor.hello.probe) return Reading::kNone;
  const bool isCheap =
      options_.singleCopy == SingleCopy::kAuto ? trial.isCheap : options_.singleCopy == SingleCopy::kEager;
  return isCheap ? Reading::kCheap : Reading::kDear;
}

// A knock, a goodbye, or the end of the peer.
void ShmTransport::hear(Link& link, Descriptor& socket) {
  while (socket) {
    Word word;
    Descriptor passed;
    const ssize_t got = hearWord(socket.get(), word, passed);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0 && word.what == kMemory) passed_.insert_or_assign({link.id, word.key}, std::move(passed));
    if (got > 0 && word.what != kGoodbye && word.what != kRefusal) continue;
    link.saidGoodbye |= got > 0 && word.what == kGoodbye;
    socket = Descriptor();
    const bool isRefused = got > 0 && word.what == kRefusal;
    noteGone(link, isRefused ? refused() : Status::ok());
  }
}

// Peers close their side of who leaves: they have not died, and nobody here is to tell others that they have.
void ShmTransport::noteGone(Link& link, Status reason) {
  if (link.isGone || hasLeft_) return;
  link.isGone = true;
  link.reason = std::move(reason);
  gone_.push_back(&link);
}

// What a peer sent before its end is received first.
void ShmTransport::failGone() {
  for (std::size_t i = 0; i < gone_.size();) {
    Link& link = *gone_[i];
    if (link.in.data() != nullptr && link.reader.front() != nullptr) {
      ++i;
      continue;
    }
    gone_.erase(gone_.begin() + static_cast<std::ptrdiff_t>(i));
    fail(link);
  }
}

void ShmTransport::fail(Link& link) {
  link.failure = !link.reason       ? link.reason
                 : link.saidGoodbye ? processLeft()
                                    : Status(StatusCode::kPeerFailed, "its process died");
  std::erase(incoming_, &link);
  link.door = nullptr;
  matcher_.dropRemote(link.id);
  std::vector<Request*> failed;
  for (const Queued& queued : link.backlog) {
    if (queued.request != nullptr) failed.push_back(queued.request);
  }
  numBacklogged_ -= link.backlog.size();
  link.backlog.clear();
  for (Outgoing& outgoing : outgoing_) {
    if (outgoing.request != nullptr && outgoing.link == &link) failed.push_back(release(outgoing));
  }
  for (Pull& pull : pulls_) {
    if (pull.request != nullptr && pull.link == &link) finish(pull, link.failure);
  }
  for (Request* request : failed) request->finish(link.failure);
  if (peerFailed_) peerFailed_(PeerId{link.id}, link.failure);
}

void ShmTransport::wake(Link& link) {
  if (link.door == nullptr) return say(link.outSocket, kKnock);  // until it has passed us its door
  // What was written must be seen before the door is looked at.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ring(link);
}

// Only a thread that waits: it has nothing better to do.
void ShmTransport::wakeWaiter(Link& link) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (link.door != nullptr && link.door->armed.load(std::memory_order_relaxed) == kAsleepWaiting) ring(link);
}

void ShmTransport::ring(Link& link) {
  if (link.door == nullptr) return say(link.outSocket, kKnock);
  if (link.door->armed.load(std::memory_order_relaxed) == 0 || link.door->armed.exchange(0) == 0) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(link.bell.get(), &one, sizeof one);
}

Status ShmTransport::shareMemory(PeerId peer, std::uint64_t key, int descriptor) {
  Link& link = links_[static_cast<std::uint32_t>(peer)];
  FARANDOLE_RETURN_IF_ERROR(link.failure);
  Status said = sayWord(link.outSocket.get(), {kMemory, key}, descriptor);
  if (said.code() != StatusCode::kPeerLeft) return said;
  hear(link, link.outSocket);  // it may have said why
  return !link.reason ? link.reason : said;
}

Result<Descriptor> ShmTransport::takeSharedMemory(PeerId peer, std::uint64_t key) {
  const auto found = passed_.find({static_cast<std::uint32_t>(peer), key});
  if (found == passed_.end()) return Descriptor();
  Descriptor descriptor = std::move(found->second);
  passed_.erase(found);
  if (!descriptor) return noDescriptorsLeft();
  return descriptor;
}

void ShmTransport::signal() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(bell_.get(), &one, sizeof one);
}

}  // namespace farandole::transport
