#include "pipeline/ir/progress.h"

namespace farandole::pipeline {

Progress::Progress(const Plan& plan, const ActionIndex& index, ChannelModel model)
    : plan_(plan), index_(index), graph_(index.graph()), model_(model), ranks_(plan.ranks.size()) {
  std::size_t numSteps = 0;
  for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
    ranks_[rank].firstPost = numSteps;
    ranks_[rank].queueHead = nextPost(rank, 0);
    numSteps += plan.ranks[rank].size();
  }
  posts_.resize(numSteps);
  sidesStarted_.resize(numMessages(plan, graph_));
}

std::int32_t Progress::nextPost(std::int32_t rank, std::int32_t step) const {
  const std::vector<Action>& actions = plan_.ranks[rank];
  while (step < static_cast<std::int32_t>(actions.size()) && !isPost(actions[step].kind)) ++step;
  return step;
}

std::int32_t Progress::firstIncomplete(const Action& action, std::int32_t rank, std::int32_t step) const {
  for (const Action& leaf : leaves(action)) {
    for (const std::int32_t edge : inputEdges(graph_, leaf.kind, leaf.stage)) {
      if (!crossesRanks(plan_, graph_.edge(edge))) continue;
      const std::int32_t posted = index_.messageStep(receiveFor(leaf.kind), edge, leaf.microbatch);
      if (!isComplete(rank, posted)) return posted;
    }
    if (!isWaitSend(leaf.kind)) continue;
    for (ActionKind kind : {ActionKind::kSendF, ActionKind::kSendB}) {
      if (!waitsFor(leaf.kind, kind)) continue;
      for (const std::int32_t edge : messageEdges(graph_, kind, leaf.stage)) {
        const std::int32_t posted = index_.messageStep(kind, edge, leaf.microbatch);
        if (posted != ActionIndex::kAbsent && posted < step && !isComplete(rank, posted)) return posted;
      }
    }
  }
  return kNone;
}

void Progress::advance(std::int32_t rank) {
  const std::vector<Action>& actions = plan_.ranks[rank];
  RankState& state = ranks_[rank];
  state.awaited = kNone;
  for (; state.next < static_cast<std::int32_t>(actions.size()); ++state.next) {
    const Action& action = actions[state.next];
    if (!isPost(action.kind)) {
      state.awaited = firstIncomplete(action, rank, state.next);
      if (state.awaited != kNone) return;
      continue;
    }
    Post& posted = post(rank, state.next);
    posted.state = State::kPosted;
    posted.pending = static_cast<std::int32_t>(leaves(action).size());
    if (model_ == ChannelModel::kOneQueuePerRank && state.queueHead != state.next) continue;
    startable_.push_back({rank, state.next});
    startPosts();
  }
}

void Progress::startPosts() {
  while (!startable_.empty()) {
    const Place place = startable_.back();
    startable_.pop_back();
    post(place.rank, place.step).state = State::kStarted;
    for (const Action& leaf : leaves(plan_.ranks[place.rank][place.step])) {
      const std::int32_t edge = edgeOf(graph_, leaf);
      if (++sidesStarted_[messageNumber(plan_, graph_, leaf.kind, edge, leaf.microbatch)] < 2) continue;
      completeEnd(place.rank, place.step);
      completeEnd(peerRank(plan_, leaf), index_.messageStep(otherEnd(leaf.kind), edge, leaf.microbatch));
    }
  }
}

void Progress::completeEnd(std::int32_t rank, std::int32_t step) {
  Post& ended = post(rank, step);
  if (--ended.pending > 0) return;
  ended.state = State::kComplete;
  RankState& state = ranks_[rank];
  if (state.awaited == step) {
    state.awaited = kNone;
    runnable_.push_back(rank);
  }
  if (model_ != ChannelModel::kOneQueuePerRank) return;
  state.queueHead = nextPost(rank, step + 1);
  const bool more = state.queueHead < static_cast<std::int32_t>(plan_.ranks[rank].size());
  if (more && post(rank, state.queueHead).state == State::kPosted) startable_.push_back({rank, state.queueHead});
}

bool Progress::run() {
  for (std::int32_t rank = plan_.numRanks() - 1; rank >= 0; --rank) runnable_.push_back(rank);
  while (!runnable_.empty()) {
    const std::int32_t rank = runnable_.back();
    runnable_.pop_back();
    advance(rank);
  }
  for (std::int32_t rank = 0; rank < plan_.numRanks(); ++rank) {
    if (stoppedAt(rank) < static_cast<std::int32_t>(plan_.ranks[rank].size())) return false;
  }
  return true;
}

}  // namespace farandole::pipeline
