#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/p2p/message_tag.h"
#include "backend/transport/request.h"

namespace farandole::transport {

// A message that came before a receive wanted it. Its first bytes may be here
// (`payload`), or all of it still with the sender (`remote`).
struct Unexpected {
  std::uint64_t tag = 0;
  std::size_t bytes = 0;
  std::uint32_t peer = 0;      // where it came from, the transport's number
  std::uint32_t remoteId = 0;  // the sender's number for it
  std::uint32_t slot = 0;      // of the sender's shared memory
  const std::byte* remote = nullptr;
  std::vector<std::byte> payload;

  std::uint64_t order = 0;
  Unexpected* next = nullptr;
};

// Brings messages and receives together: the oldest receive that wants a
// message gets it, the oldest message that a receive wants is given to it. A
// receive wants a message when the tags are equal in the bits of its mask, which
// never include those of the element.
//
// Receives are linked through their Request and cost no allocation. Tags that
// are wanted exactly are found by hash; others by a walk. Not thread-safe.
class Matcher {
 public:
  Matcher() = default;
  ~Matcher();
  Matcher(const Matcher&) = delete;
  Matcher& operator=(const Matcher&) = delete;

  // The oldest receive that wants `tag`, taken out; null when there is none.
  Request* takeReceive(std::uint64_t tag);
  // The oldest message that this receive wants, taken out; null when there is none.
  std::unique_ptr<Unexpected> takeMessage(std::uint64_t wanted, std::uint64_t mask);

  // `request.wanted` and `request.mask` are set.
  void addReceive(Request& request);
  // False when it is not here: matched already.
  bool removeReceive(Request& request);

  std::unique_ptr<Unexpected> makeMessage();
  void addMessage(std::unique_ptr<Unexpected> message);
  // Gives a message back, for its memory to be used again.
  void recycle(std::unique_ptr<Unexpected> message);
  // Takes out every message for which `match` holds.
  template <typename Match>
  std::vector<std::unique_ptr<Unexpected>> takeIf(const Match& match);
  // Drops every message of `peer` that is still with its sender, or the one that the sender calls `id`.
  void dropRemote(std::uint32_t peer);
  bool dropRemote(std::uint32_t peer, std::uint32_t id);

 private:
  static constexpr std::size_t kBuckets = 64;

  template <typename T>
  struct Queue {
    T* head = nullptr;
    T** tail = &head;
    void push(T* item) {
      item->next = nullptr;
      *tail = item;
      tail = &item->next;
    }
    // Takes out what `at` points to.
    T* unlink(T** at) {
      T* const item = *at;
      *at = item->next;
      if (tail == &item->next) tail = at;
      return item;
    }
  };

  static std::size_t bucketOf(std::uint64_t tag);
  // Whether its tag is wanted as it is, but for the element.
  static bool isExact(std::uint64_t mask) { return (mask | p2p::kElementField) == p2p::kExactMask; }

  std::uint64_t order_ = 0;
  std::array<Queue<Request>, kBuckets> exact_;
  Queue<Request> masked_;
  std::array<Queue<Unexpected>, kBuckets> messages_;
  std::size_t numMessages_ = 0;
  std::vector<std::unique_ptr<Unexpected>> spare_;
};

template <typename Match>
std::vector<std::unique_ptr<Unexpected>> Matcher::takeIf(const Match& match) {
  std::vector<std::unique_ptr<Unexpected>> taken;
  if (numMessages_ == 0) return taken;
  for (Queue<Unexpected>& queue : messages_) {
    for (Unexpected** at = &queue.head; *at != nullptr;) {
      if (match(**at)) {
        taken.emplace_back(queue.unlink(at));
      } else {
        at = &(*at)->next;
      }
    }
  }
  numMessages_ -= taken.size();
  return taken;
}

}  // namespace farandole::transport
