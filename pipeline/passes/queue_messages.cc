#include "pipeline/passes/queue_messages.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline/ir/action_index.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/simulate.h"
#include "pipeline/ir/structure.h"

namespace farandole::pipeline {
namespace {

// A compute action, or another one that is no message, and when it ends. The sums are exact.
struct Event {
  double end;
  std::int32_t rank;
  std::int32_t step;
};

double unitCost(std::int32_t, const Action& action) {
  double sum = 0;
  for (const Action& leaf : leaves(action)) sum += leaf.kind == ActionKind::kBackward ? 2 : 1;
  return sum;
}

std::vector<Event> eventsOf(const SimulationResult& run) {
  std::vector<Event> events;
  for (std::size_t rank = 0; rank < run.ranks.size(); ++rank) {
    const std::vector<TimedAction>& actions = run.ranks[rank].actions;
    for (std::size_t step = 0; step < actions.size(); ++step) {
      events.push_back({actions[step].end, static_cast<std::int32_t>(rank), static_cast<std::int32_t>(step)});
    }
  }
  std::ranges::sort(events, {}, [](const Event& event) { return std::tuple(event.end, event.rank, event.step); });
  return events;
}

class Queuer {
 public:
  Queuer(const Plan& plan, const StageGraph& graph) : plan_(plan), graph_(graph), result_(plan) {
    for (std::vector<Action>& actions : result_.ranks) actions.clear();
  }

  Plan run(const std::vector<Event>& events) {
    for (auto begin = events.begin(); begin != events.end();) {
      const auto end = std::find_if(begin, events.end(), [&](const Event& event) { return event.end > begin->end; });
      // Nothing that ends now has waited for anything that ends now.
      for (auto event = begin; event != end; ++event) {
        const Action& action = plan_.ranks[event->rank][event->step];
        result_.ranks[event->rank].push_back(action);
        for (const Action& leaf : leaves(action)) collect(leaf);
      }
      post();
      begin = end;
    }
    return std::move(result_);
  }

 private:
  struct Sent {
    std::int32_t lower, higher;  // ranks
    Action send;
  };

  void collect(const Action& leaf) {
    for (const std::int32_t number : outputEdges(graph_, leaf.kind, leaf.stage)) {
      const StageEdge& edge = graph_.edge(number);
      if (!crossesRanks(plan_, edge)) continue;
      Action send = makeMessage(sendFor(leaf.kind), edge, leaf.microbatch);
      const auto [lower, higher] = std::minmax(plan_.rankOfStage[edge.from], plan_.rankOfStage[edge.to]);
      sent_.push_back({lower, higher, std::move(send)});
    }
  }

  void post() {
    const auto pairOf = [](const Sent& sent) { return std::pair(sent.lower, sent.higher); };
    std::ranges::stable_sort(sent_, {}, pairOf);
    for (auto begin = sent_.begin(); begin != sent_.end();) {
      const auto end =
          std::find_if(begin, sent_.end(), [&](const Sent& sent) { return pairOf(sent) != pairOf(*begin); });
      for (const std::int32_t rank : {begin->lower, begin->higher}) {
        std::vector<Action> messages;
        for (auto sent = begin; sent != end; ++sent) {
          const bool isSender = plan_.rankOfStage[sent->send.stage] == rank;
          messages.push_back(isSender ? sent->send : counterpart(sent->send));
        }
        const bool isAlone = messages.size() == 1;
        result_.ranks[rank].push_back(isAlone ? messages.front()
                                              : makeComposite(ActionKind::kBatchP2p, std::move(messages)));
      }
      begin = end;
    }
    sent_.clear();
  }

  const Plan& plan_;
  const StageGraph& graph_;
  Plan result_;
  std::vector<Sent> sent_;  // of what ends at one time
};

}  // namespace

Result<Plan> queueMessages(const Plan& plan) {
  const Result<ActionIndex> index = ActionIndex::build(plan);
  if (!index) return index.status();
  FARANDOLE_RETURN_IF_ERROR(checkStructure(plan, *index, Lowering::kCompute));
  const Result<SimulationResult> run = simulate(plan, unitCost, 0);
  if (!run) return run.status();
  return Queuer(plan, index->graph()).run(eventsOf(*run));
}

}  // namespace farandole::pipeline
