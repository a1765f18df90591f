#include "backend/net/control_messages.h"

#include "backend/net/frame.h"
#include "backend/net/wire.h"

namespace farandole::net {
namespace {

constexpr std::uint32_t kMagic = 0x4c444e46;  // "FNDL"

Status malformed(const char* what) { return Status::internal(std::string("a malformed ") + what + " frame"); }

}  // namespace

std::string HelloMessage::encode() const { return WireWriter().number(kMagic).number(plane).number(nonce).take(); }

Result<HelloMessage> HelloMessage::decode(std::string_view payload) {
  WireReader reader(payload);
  const bool ours = reader.number<std::uint32_t>() == kMagic;
  HelloMessage message;
  message.plane = reader.number<std::uint64_t>();
  message.nonce = reader.number<std::uint64_t>();
  if (!ours || !reader.complete()) return malformed("hello");
  return message;
}

std::string AttachMessage::encode() const { return WireWriter().text(group).number(rank).text(proof).take(); }

Result<AttachMessage> AttachMessage::decode(std::string_view payload) {
  WireReader reader(payload);
  AttachMessage message;
  message.group = reader.text();
  message.rank = reader.number<int>();
  message.proof = reader.text();
  if (!reader.complete() || message.group.size() > kMaxGroupKey || message.rank < 0) return malformed("attach");
  return message;
}

std::vector<std::string> FactsMessage::encode() const {
  std::vector<std::string> payloads;
  WireWriter writer;
  for (const Fact& fact : facts) {
    if (writer.size() > 0 && writer.size() + kMaxReason + 32 > kMaxFramePayload) payloads.push_back(writer.take());
    if (writer.size() == 0) writer.text(group);
    writer.number(static_cast<std::uint8_t>(fact.kind)).number(fact.rank).number(fact.seenBy).text(fact.reason);
  }
  if (writer.size() > 0) payloads.push_back(writer.take());
  return payloads;
}

Result<FactsMessage> FactsMessage::decode(std::string_view payload) {
  WireReader reader(payload);
  FactsMessage message;
  message.group = reader.text();
  while (reader.ok() && !reader.complete()) {
    Fact fact;
    const auto kind = reader.number<std::uint8_t>();
    fact.kind = static_cast<FactKind>(kind);
    fact.rank = reader.number<int>();
    fact.seenBy = reader.number<int>();
    fact.reason = reader.text();
    if (kind < 1 || kind > 3 || fact.rank < 0 || fact.reason.size() > kMaxReason) return malformed("facts");
    message.facts.push_back(std::move(fact));
  }
  if (!reader.complete()) return malformed("facts");
  return message;
}

std::string HandedMessage::encode() const { return WireWriter().text(group).take(); }

Result<HandedMessage> HandedMessage::decode(std::string_view payload) {
  WireReader reader(payload);
  HandedMessage message{std::string(reader.text())};
  if (!reader.complete()) return malformed("handed");
  return message;
}

std::string AskMessage::encode() const { return WireWriter().text(group).number(asker).number(number).take(); }

Result<AskMessage> AskMessage::decode(std::string_view payload) {
  WireReader reader(payload);
  AskMessage message;
  message.group = reader.text();
  message.asker = reader.number<int>();
  message.number = reader.number<std::uint64_t>();
  if (!reader.complete() || message.asker < 0) return malformed("ask");
  return message;
}

std::string AnswerMessage::encode() const {
  return WireWriter().text(group).number(asker).number(number).number(rank).text(text).take();
}

Result<AnswerMessage> AnswerMessage::decode(std::string_view payload) {
  WireReader reader(payload);
  AnswerMessage message;
  message.group = reader.text();
  message.asker = reader.number<int>();
  message.number = reader.number<std::uint64_t>();
  message.rank = reader.number<int>();
  message.text = reader.text();
  if (!reader.complete() || message.asker < 0 || message.rank < 0 || message.text.size() > kMaxAnswer) {
    return malformed("answer");
  }
  return message;
}

}  // namespace farandole::net
