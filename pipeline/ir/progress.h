#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/ir/action_index.h"
#include "pipeline/ir/channel_model.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Runs a lowered plan without time, as the executor would. Posts return at
// once; a compute action waits for the posts (single or batch, as a whole) that
// bring what it consumes, a WAIT_SEND for those that hold its sends.
//
// Every message has one sender and one receiver, fixed by the plan, so an
// action that can go on can go on later too: whatever order ranks are taken in,
// they get equally far, and one greedy run decides for all of them. Each rank
// is retried only when the post that it waits for completes: linear time, for stages with a bounded number of edges.
//
// The plan must have passed checkStructure(), and outlive this.
class Progress {
 public:
  static constexpr std::int32_t kNone = -1;

  Progress(const Plan& plan, const ActionIndex& index, ChannelModel model);

  // Goes as far as possible. True when all ranks end; then all posts are
  // complete, for each receive has a compute action that waited for it.
  bool run();

  // The step that a rank stopped at; the number of its steps when it ended.
  std::int32_t stoppedAt(std::int32_t rank) const { return ranks_[rank].next; }

  // The step of a post that the rank waits for where it stopped, or kNone.
  std::int32_t awaitedPost(std::int32_t rank) const { return ranks_[rank].awaited; }

  // A post is complete, or it has started (its messages need only their other
  // ends), or it stands behind others of its rank.
  bool isComplete(std::int32_t rank, std::int32_t step) const { return post(rank, step).state == State::kComplete; }
  bool isStarted(std::int32_t rank, std::int32_t step) const { return post(rank, step).state >= State::kStarted; }

  // The post at the head of the rank's queue; the number of its steps when none is left.
  std::int32_t queueHead(std::int32_t rank) const { return ranks_[rank].queueHead; }

  // Whether both ends of a send or receive have started.
  bool isTransferred(const Action& message) const {
    const std::int32_t edge = edgeOf(graph_, message);
    return sidesStarted_[messageNumber(plan_, graph_, message.kind, edge, message.microbatch)] == 2;
  }

 private:
  enum class State : std::uint8_t { kUnposted, kPosted, kStarted, kComplete };
  struct Post {
    State state = State::kUnposted;
    std::int32_t pending = 0;  // messages not yet transferred
  };
  struct RankState {
    std::int32_t next = 0;
    std::int32_t awaited = kNone;
    std::int32_t queueHead = 0;
    std::size_t firstPost = 0;  // of posts_
  };
  struct Place {
    std::int32_t rank;
    std::int32_t step;
  };

  const Post& post(std::int32_t rank, std::int32_t step) const { return posts_[ranks_[rank].firstPost + step]; }
  Post& post(std::int32_t rank, std::int32_t step) { return posts_[ranks_[rank].firstPost + step]; }
  std::int32_t nextPost(std::int32_t rank, std::int32_t step) const;
  std::int32_t firstIncomplete(const Action& action, std::int32_t rank, std::int32_t step) const;
  void advance(std::int32_t rank);
  void startPosts();
  void completeEnd(std::int32_t rank, std::int32_t step);

  const Plan& plan_;
  const ActionIndex& index_;
  const StageGraph& graph_;
  ChannelModel model_;
  std::vector<RankState> ranks_;
  std::vector<Post> posts_;                 // one per step of every rank, used where the step posts
  std::vector<std::uint8_t> sidesStarted_;  // [number of a message]
  std::vector<std::int32_t> runnable_;      // ranks
  std::vector<Place> startable_;            // posts
};

}  // namespace farandole::pipeline
