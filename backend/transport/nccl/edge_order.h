#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "backend/common/status.h"

namespace farandole::transport {

// What both sides must agree on for a message.
struct EdgeNote {
  std::uint32_t tag;
  std::uint32_t element;  // what it is made of (p2p/message_tag.h)
  std::uint64_t bytes;

  auto operator<=>(const EdgeNote&) const = default;
};

// What a rank tells the other end of an edge of one message that it has posted, in the order of issue.
struct EdgeWord {
  enum Flag : std::uint8_t {
    kIsWord = 1,
    kIsSend = 2,   // by who tells it
    kIsLast = 4,   // of its post
    kIsByTag = 8,  // the post was launched in the order of its tags
    kIsEnd = 16,   // no message: from here on nothing is told
  };
  EdgeNote note() const { return {tag, element, bytes}; }

  std::uint32_t tag;
  std::uint8_t element;
  std::uint8_t flags;
  std::uint16_t device;  // its ordinal
  std::uint64_t bytes;
};

// In which order one end of a directed edge launches what was posted to it, and whether the other end does so, too.
//
// NCCL has no tags: the first message is for the first. The order is that of issue, but for a post of several messages
// (those of a batch) whose tags do not ascend: where the other end has posted the same messages at once, both launch
// them in the order of their tags. That takes knowing what the other end has posted; what was the same once is taken to
// be the same again. Both ends tell each other everything, if late, and so find out where they differ.
//
// Guarded by its owner.
class EdgeOrder {
 public:
  enum class Order : std::uint8_t { kAsIssued, kByTag, kUnknown };
  struct Difference {
    EdgeNote ours;
    EdgeNote theirs;
  };
  struct Outcome {
    Order order = Order::kUnknown;         // of what was posted
    std::optional<Difference> difference;  // between what was posted here and there
    bool hasSettled = false;               // something that was unknown before: see takeSettled()
    bool isStuck = false;                  // something will be unknown for ever
  };

  // The next post on this side. `base` has the flags and the device of this side's words. kInvalidArgument where its
  // order can never be known; it does not count then.
  Result<Outcome> post(std::span<const EdgeNote> notes, EdgeWord base);
  // From here on nothing can be told of what is posted: it will run any number of times, in a graph.
  void end(EdgeWord base);
  // The other end's next word.
  Outcome hear(const EdgeWord& word);
  // The order of the first post that was unknown and is known now.
  std::optional<Order> takeSettled();
  bool hasUntold() const { return !untold_.empty(); }
  // Takes what the other end is to be told.
  void takeUntold(std::vector<EdgeWord>& words);

 private:
  struct Post {
    std::uint64_t first;  // of its messages, among all along the edge
    std::uint64_t count;
    Order order;
  };
  // What one end has posted and was not compared yet: messages, and the posts that they belong to. Those of a post that
  // goes by tag are in that order.
  struct Side {
    void add(std::span<const EdgeNote> added, Order order);
    std::vector<EdgeNote> notesOf(const Post& post) const;
    const Post* find(std::uint64_t message) const;
    void sort(const Post& post);
    // The first message that was not compared, and the first whose place is not known.
    std::uint64_t begin() const { return end - notes.size(); }
    std::uint64_t known() const;
    void pop();

    std::uint64_t end = 0;
    std::size_t numUnknown = 0;  // posts
    std::deque<EdgeNote> notes;
    std::deque<Post> posts;
  };
  std::optional<Order> orderAlone(std::span<const EdgeNote> notes) const;
  // Settles what it can of both sides, and compares them; the orders of what was settled of ours.
  std::vector<Order> settleBoth(Outcome& outcome);
  std::vector<Order> settle(Side& side, const Side& other);
  void remember(std::vector<EdgeNote> notes);
  std::optional<Difference> compare();

  Side ours_;
  Side theirs_;
  std::vector<EdgeNote> incoming_;  // of a post that was not told to its end yet
  std::vector<EdgeWord> untold_;
  std::deque<Order> settled_;
  std::set<std::vector<EdgeNote>> same_;  // posts in their order of issue
  bool isOver_ = false;                   // nothing is told any more
  bool differs_ = false;                  // which was said; what the edge belongs to is about to end
};

}  // namespace farandole::transport
