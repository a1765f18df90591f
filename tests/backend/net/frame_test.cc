#include "backend/net/frame.h"

#include <gtest/gtest.h>

#include <random>

#include "backend/net/control_messages.h"

namespace farandole::net {
namespace {

std::string randomBytes(std::mt19937_64& random, std::size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

TEST(Frame, IsReadBackWhereverTheStreamIsCut) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    std::vector<Frame> sent(random() % 8);
    std::string stream;
    for (Frame& frame : sent) {
      frame.type = static_cast<FrameType>(1 + random() % 7);
      frame.payload = randomBytes(random, random() % 4 == 0 ? 0 : random() % 3000);
      stream += encodeFrame(frame.type, frame.payload);
    }
    FrameReader reader(3000);
    std::vector<Frame> received;
    std::string_view rest = stream;
    while (!rest.empty()) {
      std::string_view piece = rest.substr(0, 1 + random() % (round % 2 == 0 ? 3 : 5000));
      rest.remove_prefix(piece.size());
      while (!piece.empty()) {
        auto frame = reader.take(piece);
        ASSERT_TRUE(frame) << frame.status().toString();
        if (*frame) received.push_back(**frame);
      }
    }
    ASSERT_EQ(received.size(), sent.size());
    for (std::size_t i = 0; i < sent.size(); ++i) {
      EXPECT_EQ(received[i].type, sent[i].type);
      EXPECT_EQ(received[i].payload, sent[i].payload);
    }
  }
}

TEST(Frame, LargerThanAllowedIsRefusedByItsHeaderAlone) {
  FrameReader reader(100);
  const std::string fits = encodeFrame(FrameType::kFacts, std::string(100, 'x'));
  const std::string tooLong = encodeFrame(FrameType::kFacts, std::string(101, 'x')).substr(0, kFrameHeaderBytes);
  std::string_view bytes = fits;
  EXPECT_TRUE(reader.take(bytes));
  bytes = tooLong;
  const auto refused = reader.take(bytes);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.status().message().find("101 bytes, allowed are 100"), std::string_view::npos);
}

TEST(Frame, OfAnotherVersionOrTypeIsRefused) {
  for (const auto& [at, value] : {std::pair<std::size_t, char>{4, 2}, {5, 0}, {5, 8}}) {
    std::string frame = encodeFrame(FrameType::kHello, "x");
    frame[at] = value;
    std::string_view bytes = frame;
    EXPECT_FALSE(FrameReader(100).take(bytes)) << at << " " << int{value};
  }
}

TEST(Frame, GarbageNeverYieldsMoreThanItsBytesAndEndsOrWaits) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 2000; ++round) {
    std::string garbage = randomBytes(random, random() % 200);
    if (round % 2 == 0 && garbage.size() > 6) garbage.replace(0, 6, std::string("\x10\0\0\0\x01\x02", 6));
    FrameReader reader(64);
    std::string_view bytes = garbage;
    std::size_t taken = 0;
    while (!bytes.empty()) {
      auto frame = reader.take(bytes);
      if (!frame) break;
      if (*frame) taken += kFrameHeaderBytes + (*frame)->payload.size();
    }
    EXPECT_LE(taken, garbage.size());
  }
}

// Cut or changed anywhere, a message is refused or read as another one: never out of bounds (under the sanitizers).
TEST(ControlMessages, SurviveEveryCutAndRandomChanges) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::vector<std::string> payloads = {
      HelloMessage{1, 2}.encode(), AttachMessage{"group", 3, std::string(16, 'p')}.encode(),
      FactsMessage{"group", {{FactKind::kFailed, 5, 6, "why"}, {FactKind::kLeft, 7, 7, ""}}}.encode()[0],
      AskMessage{"group", 1, 2}.encode(), AnswerMessage{"group", 1, 2, 3, "text"}.encode()};
  const auto decodeAll = [](std::string_view payload) {
    return int{HelloMessage::decode(payload).isOk()} + int{AttachMessage::decode(payload).isOk()} +
           int{FactsMessage::decode(payload).isOk()} + int{AskMessage::decode(payload).isOk()} +
           int{AnswerMessage::decode(payload).isOk()};
  };
  for (const std::string& payload : payloads) {
    EXPECT_GE(decodeAll(payload), 1);
    for (std::size_t cut = 0; cut < payload.size(); ++cut) decodeAll(std::string_view(payload).substr(0, cut));
    for (int round = 0; round < 500; ++round) {
      std::string changed = payload;
      changed[random() % changed.size()] = static_cast<char>(random());
      decodeAll(changed);
    }
    EXPECT_FALSE(HelloMessage::decode(payload + "x"));
  }
}

TEST(ControlMessages, CarryAnyNumberOfFactsInFramesWithinTheLimit) {
  FactsMessage message{"group", {}};
  for (int rank = 0; rank < 5000; ++rank) {
    message.facts.push_back(
        {FactKind::kAborted, rank, rank + 1, std::string(static_cast<std::size_t>(rank) % 100, 'r')});
  }
  std::vector<Fact> received;
  for (const std::string& payload : message.encode()) {
    EXPECT_LE(payload.size(), kMaxFramePayload);
    const auto part = FactsMessage::decode(payload);
    ASSERT_TRUE(part) << part.status().toString();
    EXPECT_EQ((*part).group, "group");
    received.insert(received.end(), (*part).facts.begin(), (*part).facts.end());
  }
  ASSERT_EQ(received.size(), message.facts.size());
  for (int rank = 0; rank < 5000; ++rank) {
    EXPECT_EQ(received[static_cast<std::size_t>(rank)].rank, rank);
    EXPECT_EQ(received[static_cast<std::size_t>(rank)].seenBy, rank + 1);
    EXPECT_EQ(received[static_cast<std::size_t>(rank)].reason.size(), static_cast<std::size_t>(rank) % 100);
  }
}

}  // namespace
}  // namespace farandole::net
