#include "tests/pipeline/ir/random_runner.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

// Kind, stage, microbatch, and of a message the stage at the other end.
using Label = std::tuple<ActionKind, std::int32_t, std::int32_t, std::int32_t>;

bool goesOut(ActionKind kind) { return kind == ActionKind::kSendF || kind == ActionKind::kRecvB; }

std::int32_t otherOf(const Action& action) {
  if (!isSend(action.kind) && !isReceive(action.kind)) return -1;
  if (action.other != kNeighbour) return action.other;
  return goesOut(action.kind) ? action.stage + 1 : action.stage - 1;
}

Label labelOf(const Action& action) { return {action.kind, action.stage, action.microbatch, otherOf(action)}; }

// What the receive must be filled with: the label of the send on the other stage.
Label expectedBy(const Action& receive) {
  const ActionKind send = receive.kind == ActionKind::kRecvF ? ActionKind::kSendF : ActionKind::kSendB;
  return {send, otherOf(receive), receive.microbatch, receive.stage};
}

struct Part {
  Action action;
  std::int32_t peer = 0;
  bool done = false;
};

struct Batch {
  std::vector<Part> parts;
  bool done() const {
    for (const Part& part : parts) {
      if (!part.done) return false;
    }
    return true;
  }
};

struct Rank {
  std::size_t next = 0;
  std::vector<Batch> posted;
  std::set<Label> computed;
  std::set<Label> messages;  // posted so far
  std::set<std::int32_t> reduced;
};

class Runner {
 public:
  Runner(const Plan& plan, ChannelModel model, std::mt19937_64& random, Host host)
      : plan_(plan),
        model_(model),
        host_(host),
        random_(random),
        ranks_(plan.ranks.size()),
        before_(static_cast<std::size_t>(plan.numStages)),
        after_(static_cast<std::size_t>(plan.numStages)) {
    if (plan.edges) {
      for (const auto& [from, to] : *plan.edges) join(from, to);
    } else {
      for (std::int32_t stage = 1; stage < plan.numStages; ++stage) join(stage - 1, stage);
    }
    for (const auto& actions : plan.ranks) {
      for (const Action& action : actions) {
        for (const Action& leaf : leaves(action))
          training_ |= isInputBackward(leaf.kind) || isWeightBackward(leaf.kind);
      }
    }
  }

  std::string run() {
    bool moved = true;
    while (moved && wrong_.empty()) {
      moved = false;
      std::vector<std::size_t> order(2 * ranks_.size());
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), random_);
      for (std::size_t event : order) {
        const std::size_t rank = event / 2;
        if (event % 2 == 0 ? transferTo(rank) : step(rank)) {
          moved = true;
          break;
        }
      }
    }
    return wrong_.empty() ? leftOver() : wrong_;
  }

 private:
  void join(std::int32_t from, std::int32_t to) {
    after_[static_cast<std::size_t>(from)].push_back(to);
    before_[static_cast<std::size_t>(to)].push_back(from);
  }

  const std::vector<std::int32_t>& ends(std::int32_t stage, bool out) const {
    return (out ? after_ : before_)[static_cast<std::size_t>(stage)];
  }

  bool isRunBy(std::int32_t stage, std::int32_t microbatch) const {
    if (microbatch < 0 || microbatch >= plan_.numMicrobatches) return false;
    if (plan_.microbatchesOfStage.empty()) return true;
    const auto [begin, end] = plan_.microbatchesOfStage[static_cast<std::size_t>(stage)];
    return begin <= microbatch && microbatch < end;
  }

  bool fail(std::size_t rank, const Action& action, const std::string& why) {
    wrong_ = "rank " + std::to_string(rank) + ", " + toString(action) + ": " + why;
    return true;
  }

  std::optional<std::int32_t> rankOf(std::int32_t stage) const {
    if (stage < 0 || stage >= plan_.numStages) return std::nullopt;
    return plan_.rankOfStage[stage];
  }

  // The posted parts that may move now between `rank` and another, in order.
  std::vector<Part*> active(std::size_t rank, std::size_t peer, bool sends) {
    std::vector<Part*> parts;
    for (Batch& batch : ranks_[rank].posted) {
      if (batch.done()) continue;
      for (Part& part : batch.parts) {
        if (part.done || part.peer != static_cast<std::int32_t>(peer)) continue;
        if (isSend(part.action.kind) == sends) parts.push_back(&part);
      }
      if (model_ == ChannelModel::kOneQueuePerRank) break;
    }
    return parts;
  }

  bool transferTo(std::size_t rank) {
    const std::size_t first = random_() % ranks_.size();
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      const std::size_t peer = (first + i) % ranks_.size();
      const std::vector<Part*> receives = active(rank, peer, false);
      const std::vector<Part*> sends = active(peer, rank, true);
      if (receives.empty() || sends.empty()) continue;
      if (model_ != ChannelModel::kTagged) return deliver(rank, *sends.front(), *receives.front());
      for (Part* receive : receives) {
        for (Part* send : sends) {
          if (labelOf(send->action) == expectedBy(receive->action)) return deliver(rank, *send, *receive);
        }
      }
    }
    return false;
  }

  bool deliver(std::size_t rank, Part& send, Part& receive) {
    send.done = receive.done = true;
    if (labelOf(send.action) == expectedBy(receive.action)) return true;
    return fail(rank, receive.action, "got the contents of " + toString(send.action));
  }

  bool step(std::size_t rank) {
    Rank& state = ranks_[rank];
    if (state.next == plan_.ranks[rank].size()) return false;
    const Action& action = plan_.ranks[rank][state.next];
    for (const Action& leaf : leaves(action)) {
      if (rankOf(leaf.stage) != static_cast<std::int32_t>(rank)) return fail(rank, action, "not the owner");
      if (hasMicrobatch(leaf.kind) && !isRunBy(leaf.stage, leaf.microbatch)) return fail(rank, action, "not its own");
    }
    if (isPost(action.kind)) {
      if (!post(rank, action)) return true;
    } else {
      if (host_ == Host::kSynchronizes && !std::ranges::all_of(state.posted, &Batch::done)) return false;
      for (const Action& leaf : leaves(action)) {
        const std::optional<bool> ready = isReady(rank, leaf);
        if (!ready) return true;
        if (!*ready) return false;
      }
      for (const Action& leaf : leaves(action)) {
        if (isCompute(leaf.kind) && !state.computed.insert(labelOf(leaf)).second) return fail(rank, leaf, "again");
      }
    }
    ++state.next;
    return true;
  }

  bool post(std::size_t rank, const Action& action) {
    Batch batch;
    for (const Action& leaf : leaves(action)) {
      const std::vector<std::int32_t>& others = ends(leaf.stage, goesOut(leaf.kind));
      if (std::find(others.begin(), others.end(), otherOf(leaf)) == others.end()) return !fail(rank, leaf, "no edge");
      if (leaf.other == leaf.stage + (goesOut(leaf.kind) ? 1 : -1)) return !fail(rank, leaf, "named the neighbour");
      const std::optional<std::int32_t> peer = rankOf(otherOf(leaf));
      if (!peer || *peer == static_cast<std::int32_t>(rank)) return !fail(rank, leaf, "no peer");
      if (!batch.parts.empty() && batch.parts.front().peer != *peer) return !fail(rank, leaf, "two peers");
      if (leaf.kind == ActionKind::kSendF && !did(rank, ActionKind::kForward, leaf))
        return !fail(rank, leaf, "no data");
      if (leaf.kind == ActionKind::kSendB && !didInputBackward(rank, leaf)) return !fail(rank, leaf, "no data");
      if (!ranks_[rank].messages.insert(labelOf(leaf)).second) return !fail(rank, leaf, "posted again");
      batch.parts.push_back({leaf, *peer, false});
    }
    ranks_[rank].posted.push_back(batch);
    return true;
  }

  bool did(std::size_t rank, ActionKind kind, const Action& about) const {
    return ranks_[rank].computed.contains({kind, about.stage, about.microbatch, -1});
  }
  bool didInputBackward(std::size_t rank, const Action& about) const {
    return did(rank, ActionKind::kBackward, about) || did(rank, ActionKind::kBackwardInput, about);
  }
  bool didWeightBackward(std::size_t rank, const Action& about) const {
    return did(rank, ActionKind::kBackward, about) || did(rank, ActionKind::kBackwardWeight, about);
  }

  // Whether the batch with the message has completed; none if it was never posted.
  std::optional<bool> arrived(std::size_t rank, const Label& message) const {
    for (const Batch& batch : ranks_[rank].posted) {
      for (const Part& part : batch.parts) {
        if (labelOf(part.action) == message) return batch.done();
      }
    }
    return std::nullopt;
  }

  std::optional<bool> broken(std::size_t rank, const Action& leaf, const std::string& why) {
    fail(rank, leaf, why);
    return std::nullopt;
  }

  // True: go, false: later, none: never.
  std::optional<bool> isReady(std::size_t rank, const Action& leaf) {
    const bool forward = isForward(leaf.kind);
    if (isInputBackward(leaf.kind)) {
      if (!did(rank, ActionKind::kForward, leaf)) return broken(rank, leaf, "no forward");
      if (didInputBackward(rank, leaf) || didWeightBackward(rank, leaf)) return broken(rank, leaf, "done before");
    }
    if (leaf.kind == ActionKind::kBackwardWeight && !did(rank, ActionKind::kBackwardInput, leaf)) {
      return broken(rank, leaf, "no I");
    }
    if (forward || isInputBackward(leaf.kind)) return hasInputs(rank, leaf);
    if (isWaitSend(leaf.kind)) return sendsDone(rank, leaf);
    if (leaf.kind == ActionKind::kReduceGrad) {
      for (Action about = leaf; training_ && ++about.microbatch < plan_.numMicrobatches;) {
        if (!isRunBy(about.stage, about.microbatch)) continue;
        if (!didWeightBackward(rank, about)) return broken(rank, leaf, "gradients are missing");
      }
      if (!ranks_[rank].reduced.insert(leaf.stage).second) return broken(rank, leaf, "reduced again");
    }
    if (leaf.kind == ActionKind::kWaitReduceGrad && !ranks_[rank].reduced.contains(leaf.stage)) {
      return broken(rank, leaf, "not reduced");
    }
    return true;
  }

  std::optional<bool> hasInputs(std::size_t rank, const Action& leaf) {
    const bool forward = isForward(leaf.kind);
    bool all = true;
    for (const std::int32_t source : ends(leaf.stage, !forward)) {
      Action there = leaf;
      there.stage = source;
      if (rankOf(source) == static_cast<std::int32_t>(rank)) {
        const bool done = forward ? did(rank, ActionKind::kForward, there) : didInputBackward(rank, there);
        if (!done) return broken(rank, leaf, "a stage that it needs has not run");
        continue;
      }
      const Label message{forward ? ActionKind::kRecvF : ActionKind::kRecvB, leaf.stage, leaf.microbatch, source};
      const std::optional<bool> here = arrived(rank, message);
      if (!here) return broken(rank, leaf, "nothing received");
      all &= *here;
    }
    return all;
  }

  std::optional<bool> sendsDone(std::size_t rank, const Action& wait) {
    bool any = false;
    bool all = true;
    for (ActionKind kind : {ActionKind::kSendF, ActionKind::kSendB}) {
      if (wait.kind == ActionKind::kWaitSendF && kind == ActionKind::kSendB) continue;
      if (wait.kind == ActionKind::kWaitSendB && kind == ActionKind::kSendF) continue;
      for (const std::int32_t other : ends(wait.stage, goesOut(kind))) {
        const std::optional<bool> done = arrived(rank, {kind, wait.stage, wait.microbatch, other});
        any |= done.has_value();
        all &= done.value_or(true);
      }
    }
    if (!any) return broken(rank, wait, "nothing was sent");
    return all;
  }

  std::string leftOver() const {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].next < plan_.ranks[rank].size()) {
        return "rank " + std::to_string(rank) + " is stuck at " + toString(plan_.ranks[rank][ranks_[rank].next]);
      }
      for (const Batch& batch : ranks_[rank].posted) {
        if (!batch.done()) return "rank " + std::to_string(rank) + " ends with pending messages";
      }
    }
    for (std::int32_t stage = 0; stage < plan_.numStages; ++stage) {
      const auto rank = static_cast<std::size_t>(plan_.rankOfStage[stage]);
      for (std::int32_t microbatch = 0; microbatch < plan_.numMicrobatches; ++microbatch) {
        if (!isRunBy(stage, microbatch)) continue;
        const Action about{stage, ActionKind::kForward, microbatch, {}};
        if (!did(rank, ActionKind::kForward, about)) return "a forward is missing";
        if (training_ && (!didInputBackward(rank, about) || !didWeightBackward(rank, about))) {
          return "a backward is missing";
        }
      }
    }
    return "";
  }

  const Plan& plan_;
  ChannelModel model_;
  Host host_;
  std::mt19937_64& random_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<std::int32_t>> before_;  // [stage]
  std::vector<std::vector<std::int32_t>> after_;
  bool training_ = false;
  std::string wrong_;
};

}  // namespace

std::string runRandomly(const Plan& plan, ChannelModel model, std::mt19937_64& random, Host host) {
  return Runner(plan, model, random, host).run();
}

}  // namespace farandole::pipeline
