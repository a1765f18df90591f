#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/common/status.h"

namespace farandole::net {

// The payloads of the control plane's frames. Pure; what comes from the wire is
// checked field by field and refused as a whole.

// Opens a connection: who speaks, and a number that makes the proofs on this connection its own.
struct HelloMessage {
  std::uint64_t plane = 0;
  std::uint64_t nonce = 0;

  std::string encode() const;
  static Result<HelloMessage> decode(std::string_view payload);
};

// A rank of a group speaks through this connection from now on.
struct AttachMessage {
  std::string group;
  int rank = 0;
  std::string proof;  // that it knows the group's token

  std::string encode() const;
  static Result<AttachMessage> decode(std::string_view payload);
};

enum class FactKind : std::uint8_t {
  kLeft = 1,     // in order: no failure; with a reason where its process has left all of them
  kFailed = 2,   // its process died or cannot be reached
  kAborted = 3,  // it ended the group
};

// Something that happened to a rank of a group; told to every rank once.
struct Fact {
  FactKind kind = FactKind::kLeft;
  int rank = 0;
  int seenBy = 0;
  std::string reason;
};

struct FactsMessage {
  std::string group;
  std::vector<Fact> facts;

  // As few payloads as fit the frame limit.
  std::vector<std::string> encode() const;
  static Result<FactsMessage> decode(std::string_view payload);
};

struct HandedMessage {
  std::string group;

  std::string encode() const;
  static Result<HandedMessage> decode(std::string_view payload);
};

// A question to every rank of a group, told apart by who asks and his count.
struct AskMessage {
  std::string group;
  int asker = 0;
  std::uint64_t number = 0;

  std::string encode() const;
  static Result<AskMessage> decode(std::string_view payload);
};

struct AnswerMessage {
  std::string group;
  int asker = 0;
  std::uint64_t number = 0;
  int rank = 0;
  std::string text;

  std::string encode() const;
  static Result<AnswerMessage> decode(std::string_view payload);
};

inline constexpr std::size_t kMaxGroupKey = 512;  // bytes
inline constexpr std::size_t kMaxReason = 2048;
inline constexpr std::size_t kMaxAnswer = 16 << 10;

}  // namespace farandole::net
