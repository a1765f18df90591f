#include "backend/transport/nccl/edge_order.h"

#include <algorithm>
#include <string>
#include <utility>

namespace farandole::transport {
namespace {

// A program has few batches that are listed in another order elsewhere, and they come again and again.
constexpr std::size_t kMostRemembered = 256;

using Notes = std::vector<EdgeNote>;

constexpr auto kTagOf = &EdgeNote::tag;

bool isAscending(std::span<const EdgeNote> notes) { return std::ranges::is_sorted(notes, {}, kTagOf); }

Notes byTag(Notes notes) {
  std::ranges::stable_sort(notes, {}, kTagOf);
  return notes;
}

}  // namespace

void EdgeOrder::Side::add(std::span<const EdgeNote> added, Order order) {
  posts.push_back({end, added.size(), order});
  notes.insert(notes.end(), added.begin(), added.end());
  end += added.size();
  if (order == Order::kUnknown) ++numUnknown;
  if (order == Order::kByTag) sort(posts.back());
}

Notes EdgeOrder::Side::notesOf(const Post& post) const {
  const auto first = notes.begin() + static_cast<std::ptrdiff_t>(post.first - begin());
  return {first, first + static_cast<std::ptrdiff_t>(post.count)};
}

const EdgeOrder::Post* EdgeOrder::Side::find(std::uint64_t message) const {
  const auto found = std::ranges::find_if(
      posts, [&](const Post& post) { return post.first <= message && message < post.first + post.count; });
  return found == posts.end() ? nullptr : &*found;
}

void EdgeOrder::Side::sort(const Post& post) {
  const Notes sorted = byTag(notesOf(post));
  std::ranges::copy(sorted, notes.begin() + static_cast<std::ptrdiff_t>(post.first - begin()));
}

std::uint64_t EdgeOrder::Side::known() const {
  if (numUnknown == 0) return end;
  const auto found = std::ranges::find(posts, Order::kUnknown, &Post::order);
  return found->first;
}

void EdgeOrder::Side::pop() {
  notes.pop_front();
  if (posts.front().first + posts.front().count <= begin()) posts.pop_front();
}

std::optional<EdgeOrder::Order> EdgeOrder::orderAlone(std::span<const EdgeNote> notes) const {
  if (isAscending(notes)) return Order::kAsIssued;
  if (same_.contains(Notes(notes.begin(), notes.end()))) return Order::kByTag;
  return std::nullopt;
}

Result<EdgeOrder::Outcome> EdgeOrder::post(std::span<const EdgeNote> notes, EdgeWord base) {
  const std::optional<Order> alone = orderAlone(notes);
  Outcome outcome;
  outcome.order = alone.value_or(Order::kUnknown);
  if (isOver_) {
    if (alone) return outcome;
    return Status::invalidArgument(
        "the tags of a batch do not ascend, and the other end cannot be asked for its order since one of the two has "
        "captured messages along this edge in a graph; expected ascending tags");
  }
  for (const EdgeNote& note : notes) {
    EdgeWord word = base;
    word.tag = note.tag;
    word.element = static_cast<std::uint8_t>(note.element);
    word.bytes = note.bytes;
    word.flags |= EdgeWord::kIsWord | (outcome.order == Order::kByTag ? EdgeWord::kIsByTag : 0);
    untold_.push_back(word);
  }
  untold_.back().flags |= EdgeWord::kIsLast;
  ours_.add(notes, outcome.order);
  const std::vector<Order> settled = settleBoth(outcome);
  if (!settled.empty()) outcome.order = settled.back();  // nothing before it was unknown: it would still be
  return outcome;
}

void EdgeOrder::end(EdgeWord base) {
  if (std::exchange(isOver_, true)) return;
  base.flags |= EdgeWord::kIsWord | EdgeWord::kIsEnd;
  untold_.push_back(base);
}

EdgeOrder::Outcome EdgeOrder::hear(const EdgeWord& word) {
  Outcome outcome;
  if (isOver_ || differs_) return outcome;
  if ((word.flags & EdgeWord::kIsEnd) != 0) {
    isOver_ = true;
    outcome.isStuck = ours_.numUnknown > 0;
    return outcome;
  }
  incoming_.push_back(word.note());
  if ((word.flags & EdgeWord::kIsLast) == 0) return outcome;
  const bool isByTag = (word.flags & EdgeWord::kIsByTag) != 0;
  theirs_.add(incoming_, isByTag ? Order::kByTag : isAscending(incoming_) ? Order::kAsIssued : Order::kUnknown);
  incoming_.clear();
  const std::vector<Order> settled = settleBoth(outcome);
  settled_.insert(settled_.end(), settled.begin(), settled.end());
  outcome.hasSettled = !settled.empty();
  return outcome;
}

std::optional<EdgeOrder::Order> EdgeOrder::takeSettled() {
  if (settled_.empty()) return std::nullopt;
  const Order order = settled_.front();
  settled_.pop_front();
  return order;
}

void EdgeOrder::takeUntold(std::vector<EdgeWord>& words) {
  words.insert(words.end(), untold_.begin(), untold_.end());
  untold_.clear();
}

std::vector<EdgeOrder::Order> EdgeOrder::settleBoth(Outcome& outcome) {
  std::vector<Order> settled = settle(ours_, theirs_);
  (void)settle(theirs_, ours_);
  outcome.difference = compare();
  return settled;
}

std::vector<EdgeOrder::Order> EdgeOrder::settle(Side& side, const Side& other) {
  std::vector<Order> settled;
  if (side.numUnknown == 0) return settled;
  for (Post& post : side.posts) {
    if (post.order != Order::kUnknown) continue;
    const Post* const counterpart = other.find(post.first);
    if (counterpart == nullptr) break;
    Notes notes = side.notesOf(post);
    const bool isSame = counterpart->first == post.first && counterpart->count == post.count &&
                        byTag(other.notesOf(*counterpart)) == byTag(notes);
    post.order = isSame ? Order::kByTag : Order::kAsIssued;
    settled.push_back(post.order);
    --side.numUnknown;
    if (!isSame) continue;
    side.sort(post);
    if (&side == &ours_) remember(std::move(notes));
  }
  return settled;
}

void EdgeOrder::remember(Notes notes) {
  if (same_.size() >= kMostRemembered) same_.clear();
  same_.insert(std::move(notes));
}

std::optional<EdgeOrder::Difference> EdgeOrder::compare() {
  for (std::uint64_t known = std::min(ours_.known(), theirs_.known()); ours_.begin() < known;) {
    const Difference front{ours_.notes.front(), theirs_.notes.front()};
    if (front.ours != front.theirs) {
      differs_ = true;
      return front;
    }
    ours_.pop();
    theirs_.pop();
  }
  return std::nullopt;
}

}  // namespace farandole::transport
