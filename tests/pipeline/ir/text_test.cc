#include "pipeline/ir/text.h"

#include <gtest/gtest.h>

#include <random>
#include <sstream>

#include "pipeline/ir/message.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

constexpr int kNumKinds = static_cast<int>(ActionKind::kWaitReduceGrad) + 1;

Action randomPlain(std::mt19937_64& random) {
  while (true) {
    const auto kind = static_cast<ActionKind>(random() % kNumKinds);
    if (isComposite(kind)) continue;
    const auto stage = static_cast<std::int32_t>(random() % 2000);
    Action action{stage, kind, hasMicrobatch(kind) ? static_cast<std::int32_t>(random() % 100000) : kNoMicrobatch, {}};
    const auto other = static_cast<std::int32_t>(random() % 2000);
    if (isMessage(kind) && random() % 2 == 0 && other != neighbourOf(kind, stage)) action.other = other;
    return action;
  }
}

Action randomAction(std::mt19937_64& random) {
  if (random() % 4 != 0) return randomPlain(random);
  std::vector<Action> parts(1 + random() % 5);
  for (Action& part : parts) part = randomPlain(random);
  return makeComposite(random() % 2 == 0 ? ActionKind::kOverlapFB : ActionKind::kBatchP2p, parts);
}

std::string errorOf(std::string_view text) {
  const Result<Action> action = parseAction(text);
  return action ? "parsed as " + toString(*action) : action.status().toString();
}

TEST(ActionText, WritesTheFormOfTorch) {
  EXPECT_EQ(toString(Action{2, ActionKind::kForward, 0, {}}), "2F0");
  EXPECT_EQ(toString(Action{0, ActionKind::kBackwardInput, 4, {}}), "0I4");
  EXPECT_EQ(toString(Action{3, ActionKind::kSendF, 1, {}}), "3SEND_F1");
  EXPECT_EQ(toString(Action{0, ActionKind::kUnshard, kNoMicrobatch, {}}), "0UNSHARD");
  const Action overlap =
      makeComposite(ActionKind::kOverlapFB, {{0, ActionKind::kForward, 1, {}}, {3, ActionKind::kBackward, 0, {}}});
  EXPECT_EQ(toString(overlap), "(0F1;3B0)OVERLAP_F_B");
}

TEST(ActionText, ReadsOurOwnActions) {
  const Result<Action> batch = parseAction("(0SEND_F1;0RECV_B0)BATCH_P2P");
  ASSERT_TRUE(batch) << batch.status().toString();
  EXPECT_EQ(*batch,
            makeComposite(ActionKind::kBatchP2p, {{0, ActionKind::kSendF, 1, {}}, {0, ActionKind::kRecvB, 0, {}}}));
  const Result<Action> wait = parseAction("0WAIT_SEND1");
  ASSERT_TRUE(wait) << wait.status().toString();
  EXPECT_EQ(*wait, (Action{0, ActionKind::kWaitSend, 1, {}}));
}

TEST(ActionText, NamesTheOtherStageWhereItIsNotTheChainsNeighbour) {
  EXPECT_EQ(toString(makeMessage(ActionKind::kSendF, {2, 5}, 1)), "2SEND_F1>5");
  EXPECT_EQ(toString(makeMessage(ActionKind::kRecvF, {2, 5}, 1)), "5RECV_F1<2");
  EXPECT_EQ(toString(makeMessage(ActionKind::kSendB, {2, 5}, 1)), "5SEND_B1>2");
  EXPECT_EQ(toString(makeMessage(ActionKind::kRecvB, {2, 5}, 1)), "2RECV_B1<5");
  EXPECT_EQ(toString(makeMessage(ActionKind::kSendF, {2, 3}, 1)), "2SEND_F1");
  EXPECT_EQ(toString(makeMessage(ActionKind::kRecvF, {3, 2}, 1)), "2RECV_F1<3");
  const Result<Action> batch = parseAction("(2SEND_F1>5;2RECV_B0<5)BATCH_P2P");
  ASSERT_TRUE(batch) << batch.status().toString();
  EXPECT_EQ(*batch, makeComposite(ActionKind::kBatchP2p, {makeMessage(ActionKind::kSendF, {2, 5}, 1),
                                                          makeMessage(ActionKind::kRecvB, {2, 5}, 0)}));
}

TEST(ActionText, RefusesOtherStagesThatItDoesNotWrite) {
  EXPECT_NE(errorOf("2SEND_F1>3").find("stage 3 is the one that is meant where none is named"), std::string::npos);
  EXPECT_NE(errorOf("2RECV_F1<1").find("stage 1 is the one"), std::string::npos);
  EXPECT_NE(errorOf("2SEND_F1<5").find("unexpected '<5' at the end"), std::string::npos);
  EXPECT_NE(errorOf("2WAIT_SEND1>5").find("unexpected '>5' at the end"), std::string::npos);
  EXPECT_NE(errorOf("2F1>5").find("unexpected '>5' at the end"), std::string::npos);
  EXPECT_NE(errorOf("2SEND_F1>").find("the other stage is not a number"), std::string::npos);
}

TEST(ActionText, EveryLineThatTorchWroteComesBackUnchanged) {
  std::istringstream lines(readGolden("actions.txt"));
  int numLines = 0;
  for (std::string line; std::getline(lines, line); ++numLines) {
    const Result<Action> action = parseAction(line);
    ASSERT_TRUE(action) << action.status().toString();
    EXPECT_EQ(toString(*action), line);
  }
  EXPECT_EQ(numLines, 340);
}

TEST(ActionText, RandomActionsComeBackEqual) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 20000; ++i) {
    const Action action = randomAction(random);
    const Result<Action> back = parseAction("  " + toString(action) + " ");
    ASSERT_TRUE(back) << back.status().toString();
    ASSERT_EQ(*back, action) << toString(action);
  }
}

TEST(ActionText, RandomlyDamagedTextIsEitherRefusedOrWrittenBackAsItIs) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  constexpr std::string_view kAlphabet = "0123456789FBIWSENDRCV_();, <>";
  int numRefused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = toString(randomAction(random));
    text[random() % text.size()] = kAlphabet[random() % kAlphabet.size()];
    const Result<Action> action = parseAction(text);
    if (!action) {
      ++numRefused;
      ASSERT_NE(action.status().toString().find('\''), std::string::npos);
      continue;
    }
    const Result<Action> again = parseAction(toString(*action));
    ASSERT_TRUE(again) << text;
    ASSERT_EQ(*again, *action) << text;
  }
  EXPECT_GT(numRefused, 1000);
}

TEST(ActionText, RefusalsQuoteTheTextAndSayWhatIsWrong) {
  EXPECT_EQ(errorOf("2X0"),
            "action '2X0': unknown kind 'X'; expected [stage][kind][microbatch] like '2F0', or "
            "'(2F0;3B1)OVERLAP_F_B'");
  EXPECT_NE(errorOf("").find("does not begin with a stage"), std::string::npos);
  EXPECT_NE(errorOf("F0").find("does not begin with a stage"), std::string::npos);
  EXPECT_NE(errorOf("2F").find("the microbatch is missing"), std::string::npos);
  EXPECT_NE(errorOf("2F0x").find("unexpected 'x' at the end"), std::string::npos);
  EXPECT_NE(errorOf("2UNSHARD3").find("unexpected '3' at the end"), std::string::npos);
  EXPECT_NE(errorOf("99999999999F0").find("the stage is not below 2^30"), std::string::npos);
  EXPECT_NE(errorOf("2F1073741824").find("not a number below 2^30"), std::string::npos);
  EXPECT_NE(errorOf("(0F1;3B0OVERLAP_F_B").find("')' is missing"), std::string::npos);
  EXPECT_NE(errorOf("(0F1;3B0)OVERLAP").find("after ')' stands 'OVERLAP'"), std::string::npos);
  EXPECT_NE(errorOf("(0F1;)OVERLAP_F_B").find("in '(0F1;)OVERLAP_F_B'"), std::string::npos);
  EXPECT_NE(errorOf("((0F1;3B0)OVERLAP_F_B)BATCH_P2P").find("stands 'OVERLAP_F_B)BATCH_P2P'"), std::string::npos);
}

}  // namespace
}  // namespace farandole::pipeline
