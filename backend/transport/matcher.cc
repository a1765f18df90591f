#include "backend/transport/matcher.h"

namespace farandole::transport {
namespace {

constexpr std::size_t kSpareMessages = 64;
constexpr std::size_t kSpareBytes = 16 << 10;

}  // namespace

Matcher::~Matcher() {
  for (Queue<Unexpected>& queue : messages_) {
    while (queue.head != nullptr) delete queue.unlink(&queue.head);
  }
}

// All of a tag's fields count: user tags count up, sources and groups are small numbers.
std::size_t Matcher::bucketOf(std::uint64_t tag) {
  return static_cast<std::size_t>(((tag & p2p::kAnyElementMask) * 0x9e3779b97f4a7c15u) >> 58);
}

Request* Matcher::takeReceive(std::uint64_t tag) {
  Queue<Request>& exact = exact_[bucketOf(tag)];
  Request** found = &exact.head;
  while (*found != nullptr && (((*found)->wanted ^ tag) & p2p::kAnyElementMask) != 0) found = &(*found)->next;
  if (masked_.head == nullptr) [[likely]] {
    return *found != nullptr ? exact.unlink(found) : nullptr;
  }
  Request** masked = &masked_.head;
  while (*masked != nullptr && (((*masked)->wanted ^ tag) & (*masked)->mask & p2p::kAnyElementMask) != 0) {
    masked = &(*masked)->next;
  }
  if (*masked != nullptr && (*found == nullptr || (*masked)->order < (*found)->order)) return masked_.unlink(masked);
  return *found != nullptr ? exact.unlink(found) : nullptr;
}

std::unique_ptr<Unexpected> Matcher::takeMessage(std::uint64_t wanted, std::uint64_t mask) {
  if (numMessages_ == 0) return nullptr;
  mask &= p2p::kAnyElementMask;
  const auto oldestOf = [&](Queue<Unexpected>& queue) {
    Unexpected** at = &queue.head;
    while (*at != nullptr && (((*at)->tag ^ wanted) & mask) != 0) at = &(*at)->next;
    return at;
  };
  Queue<Unexpected>* queue = &messages_[bucketOf(wanted)];
  Unexpected** found = oldestOf(*queue);
  if (!isExact(mask)) {
    for (Queue<Unexpected>& other : messages_) {
      Unexpected** const at = oldestOf(other);
      if (*at == nullptr || (*found != nullptr && (*found)->order <= (*at)->order)) continue;
      queue = &other;
      found = at;
    }
  }
  if (*found == nullptr) return nullptr;
  --numMessages_;
  return std::unique_ptr<Unexpected>(queue->unlink(found));
}

void Matcher::addReceive(Request& request) {
  request.order = order_++;
  (isExact(request.mask) ? exact_[bucketOf(request.wanted)] : masked_).push(&request);
}

bool Matcher::removeReceive(Request& request) {
  Queue<Request>& queue = isExact(request.mask) ? exact_[bucketOf(request.wanted)] : masked_;
  for (Request** at = &queue.head; *at != nullptr; at = &(*at)->next) {
    if (*at != &request) continue;
    queue.unlink(at);
    return true;
  }
  return false;
}

std::unique_ptr<Unexpected> Matcher::makeMessage() {
  if (spare_.empty()) return std::make_unique<Unexpected>();
  std::unique_ptr<Unexpected> message = std::move(spare_.back());
  spare_.pop_back();
  return message;
}

void Matcher::addMessage(std::unique_ptr<Unexpected> message) {
  message->order = order_++;
  ++numMessages_;
  messages_[bucketOf(message->tag)].push(message.release());
}

void Matcher::recycle(std::unique_ptr<Unexpected> message) {
  if (spare_.size() >= kSpareMessages || message->payload.capacity() > kSpareBytes) return;
  message->payload.clear();
  message->remote = nullptr;
  spare_.push_back(std::move(message));
}

void Matcher::dropRemote(std::uint32_t peer) {
  (void)takeIf([&](const Unexpected& message) { return message.remote != nullptr && message.peer == peer; });
}

bool Matcher::dropRemote(std::uint32_t peer, std::uint32_t id) {
  return !takeIf([&](const Unexpected& message) {
            return message.remote != nullptr && message.peer == peer && message.remoteId == id;
          }).empty();
}

}  // namespace farandole::transport
