#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/csv.h"
#include "pipeline/ir/validate.h"
#include "pipeline/passes/insert_communication.h"
#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/pipeline/ir/random_runner.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

constexpr ChannelModel kModels[] = {ChannelModel::kTagged, ChannelModel::kFifoPerEdge, ChannelModel::kOneQueuePerRank};

// Schedules on graphs that are not the chain, and a chain whose stages do not all run the same microbatches.
void addGraphs(std::vector<Plan>& plans, std::mt19937_64& random) {
  for (std::string_view name : {"GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZBV"}) {
    for (int i = 0; i < 4; ++i) {
      const auto p = static_cast<std::int32_t>(2 + random() % 3);
      const std::int32_t stages = name == "Interleaved1F1B" || name == "ZBV" ? 2 * p : p;
      ScheduleOptions options{p, stages, static_cast<std::int32_t>(1 + random() % 5), i == 3};
      options.edges = randomEdges(stages, random);
      const Plan plan = *makePlan(name, options);
      plans.push_back(*insertCommunication(plan));
      plans.push_back(*lower(plan, ChannelModel::kFifoPerEdge));
    }
  }
  for (const std::int32_t p : {2, 4}) {
    for (const bool forwardOnly : {false, true}) {
      ScheduleOptions options{p, 2 * p, 2 * p, forwardOnly};
      if (p > 2) options.edges = randomEdges(p, random);
      plans.push_back(*lower(*makePlan("DualPipe", options), ChannelModel::kFifoPerEdge));
    }
  }
}

std::vector<Plan> basePlans(std::mt19937_64& random) {
  std::vector<Plan> plans;
  for (std::string_view name : {"GPipe", "1F1B"}) {
    for (std::int32_t p : {2, 3, 4}) {
      for (std::int32_t m : {1, 3, 5}) {
        plans.push_back(loweredPlan(name, p, m));
        plans.push_back(*insertCommunication(computePlan(name, p, m)));
      }
    }
  }
  for (const std::string& name : goldenPlansWithMessages()) plans.push_back(planOf(readGolden(name)));
  addGraphs(plans, random);
  return plans;
}

void swapAny(Plan& plan, std::mt19937_64& random, bool neighbours) {
  auto& actions = plan.ranks[random() % plan.ranks.size()];
  if (actions.size() < 2) return;
  const std::size_t i = random() % (actions.size() - 1);
  std::swap(actions[i], actions[neighbours ? i + 1 : random() % actions.size()]);
}

void moveWithinRank(Plan& plan, std::mt19937_64& random) {
  auto& actions = plan.ranks[random() % plan.ranks.size()];
  const std::size_t from = random() % actions.size();
  const Action action = actions[from];
  actions.erase(actions.begin() + static_cast<std::ptrdiff_t>(from));
  actions.insert(actions.begin() + static_cast<std::ptrdiff_t>(random() % (actions.size() + 1)), action);
}

// Takes a batch apart or makes one of two neighbours.
void rebatch(Plan& plan, std::mt19937_64& random) {
  auto& actions = plan.ranks[random() % plan.ranks.size()];
  const std::size_t first = random() % actions.size();
  for (std::size_t i = first; i + 1 < actions.size(); ++i) {
    const auto at = actions.begin() + static_cast<std::ptrdiff_t>(i);
    if (at->kind == ActionKind::kBatchP2p) {
      std::vector<Action> parts = at->parts;
      if (random() % 2 == 0) std::swap(parts.front(), parts.back());
      actions.insert(actions.erase(at), parts.begin(), parts.end());
      return;
    }
    if (isPost(at->kind) && isPost((at + 1)->kind) && (at + 1)->kind != ActionKind::kBatchP2p) {
      *at = makeComposite(ActionKind::kBatchP2p, {*at, *(at + 1)});
      actions.erase(at + 1);
      return;
    }
  }
}

// On about half of the ranks every send moves before the receives that stand
// right before it, and is waited for at once, as with blocking sends.
void blockOnSends(Plan& plan, std::mt19937_64& random) {
  for (auto& actions : plan.ranks) {
    if (random() % 2 == 0) continue;
    std::vector<Action> blocking;
    for (const Action& action : actions) {
      if (!isSend(action.kind)) {
        blocking.push_back(action);
        continue;
      }
      auto place = blocking.end();
      while (place != blocking.begin() && isReceive((place - 1)->kind)) --place;
      place = blocking.insert(place, action);
      if (random() % 2 == 0) {
        blocking.insert(place + 1, {action.stage, ActionKind::kWaitSend, action.microbatch, {}});
      }
    }
    actions = std::move(blocking);
  }
}

// Another stage at the other end of a message, perhaps the one that it has, by its number.
void readdress(Action& action, std::int32_t numStages, std::mt19937_64& random) {
  Action& message = isComposite(action.kind) && !action.parts.empty() ? action.parts.front() : action;
  if (!isMessage(message.kind)) return;
  message.other = static_cast<std::int32_t>(random() % (static_cast<std::size_t>(numStages) + 1)) - 1;
}

// Takes an edge away, or adds one.
void rewire(Plan& plan, std::mt19937_64& random) {
  if (!plan.edges) return;
  if (random() % 2 == 0 && !plan.edges->empty()) {
    plan.edges->erase(plan.edges->begin() + static_cast<std::ptrdiff_t>(random() % plan.edges->size()));
    return;
  }
  const auto numStages = static_cast<std::size_t>(plan.numStages);
  const StageEdge edge{static_cast<std::int32_t>(random() % numStages),
                       static_cast<std::int32_t>(random() % numStages)};
  if (edge.from != edge.to && std::ranges::find(*plan.edges, edge) == plan.edges->end()) plan.edges->push_back(edge);
}

void mutate(Plan& plan, std::mt19937_64& random) {
  auto& actions = plan.ranks[random() % plan.ranks.size()];
  const std::size_t i = random() % actions.size();
  switch (random() % 14) {
    case 0: actions.erase(actions.begin() + static_cast<std::ptrdiff_t>(i)); break;
    case 1:
      actions.insert(actions.begin() + static_cast<std::ptrdiff_t>(random() % actions.size()), Action(actions[i]));
      break;
    case 2: {
      auto& other = plan.ranks[random() % plan.ranks.size()];
      const Action action = actions[i];
      actions.erase(actions.begin() + static_cast<std::ptrdiff_t>(i));
      other.insert(other.begin() + static_cast<std::ptrdiff_t>(random() % (other.size() + 1)), action);
      break;
    }
    case 3: {
      if (hasMicrobatch(actions[i].kind)) {
        actions[i].microbatch = static_cast<std::int32_t>(random() % static_cast<std::size_t>(plan.numMicrobatches));
      }
      break;
    }
    case 4: blockOnSends(plan, random); break;
    case 5: swapAny(plan, random, false); break;
    case 6:
    case 7: moveWithinRank(plan, random); break;
    case 8:
    case 9: rebatch(plan, random); break;
    case 10: readdress(actions[i], plan.numStages, random); break;
    case 11: rewire(plan, random); break;
    default: swapAny(plan, random, true); break;
  }
}

std::string textOf(const Plan& plan) { return toCsv(plan) + (plan.edges ? edgesText(*plan.edges) + "\n" : ""); }

TEST(ValidateRandom, TheOracleFinishesWhatIsKnownToBeRight) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const Plan& plan : basePlans(random)) EXPECT_EQ(runRandomly(plan, ChannelModel::kTagged, random), "");
}

TEST(ValidateRandom, RefusesExactlyWhatARandomRunDoesNotFinish) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::vector<Plan> bases = basePlans(random);
  std::map<std::string, int> counts;
  for (int i = 0; i < 10000; ++i) {
    Plan plan = bases[random() % bases.size()];
    for (std::size_t left = 1 + random() % 3; left > 0; --left) {
      for (auto& actions : plan.ranks) {
        if (actions.empty()) actions.push_back({0, ActionKind::kUnshard, kNoMicrobatch, {}});
      }
      mutate(plan, random);
    }
    for (ChannelModel model : kModels) {
      const Status proof = validate(plan, model);
      const std::string run = runRandomly(plan, model, random);
      ASSERT_EQ(proof.isOk(), run.empty()) << toString(model) << "\n"
                                           << textOf(plan) << "validate: " << proof.toString() << "\nrun: " << run;
      const bool deadlock = proof.message().starts_with("deadlock");
      const bool stuck = run.find("is stuck at") != run.npos || run.find("pending messages") != run.npos;
      ASSERT_TRUE(!deadlock || stuck) << run << "\n" << textOf(plan);
      const std::string outcome = proof ? "accepted" : deadlock ? "deadlock" : "refused";
      ++counts[outcome + " " + std::string(toString(model))];
    }
  }
  for (ChannelModel model : kModels) {
    for (std::string outcome : {"accepted ", "deadlock ", "refused "}) {
      EXPECT_GT(counts[outcome + std::string(toString(model))], 5) << outcome << toString(model);
      RecordProperty(outcome + std::string(toString(model)), counts[outcome + std::string(toString(model))]);
    }
  }
}

TEST(ValidateRandom, WhatOneQueueAcceptsTheOthersAcceptToo) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::vector<Plan> bases = basePlans(random);
  for (int i = 0; i < 5000; ++i) {
    Plan plan = bases[random() % bases.size()];
    mutate(plan, random);
    if (!validate(plan, ChannelModel::kOneQueuePerRank)) continue;
    ASSERT_TRUE(validate(plan, ChannelModel::kFifoPerEdge)) << textOf(plan);
    ASSERT_TRUE(validate(plan, ChannelModel::kTagged)) << textOf(plan);
  }
}

}  // namespace
}  // namespace farandole::pipeline
