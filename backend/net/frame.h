#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "backend/common/status.h"

namespace farandole::net {

// What travels between two processes of the control plane. On the wire: length
// of the payload (4 bytes, little-endian), version, type, payload.
enum class FrameType : std::uint8_t {
  kHello = 1,   // the first frame of either side
  kAttach = 2,  // a rank of a group speaks through this connection, and proves that it may
  kFacts = 3,   // what happened in a group
  kHanded = 4,  // the receiver's farewell to a group is in the hands of one who stays
  kAsk = 5,     // a question to all ranks of a group
  kAnswer = 6,
  kBye = 7,  // the last frame of either side: what ends after it ends in order
};

struct Frame {
  FrameType type = FrameType::kHello;
  std::string payload;
};

inline constexpr std::uint8_t kFrameVersion = 1;
inline constexpr std::size_t kFrameHeaderBytes = 6;
inline constexpr std::size_t kMaxFramePayload = 64 << 10;

std::string encodeFrame(FrameType type, std::string_view payload);

// Cuts a stream of bytes into frames. Holds at most one frame's payload, and
// never more of it than came or than is allowed. After an error it is of no
// further use. Pure: no thread, no clock.
class FrameReader {
 public:
  explicit FrameReader(std::size_t maxPayload) : maxPayload_(maxPayload) {}

  // A stranger is allowed less than a peer that has proved itself.
  void allow(std::size_t maxPayload) { maxPayload_ = maxPayload; }

  // Takes bytes from the front of `bytes` until a frame is whole (returned) or
  // none are left (nothing is).
  Result<std::optional<Frame>> take(std::string_view& bytes);

 private:
  Status checkHeader() const;
  std::size_t payloadBytes() const;

  std::size_t maxPayload_;
  std::array<char, kFrameHeaderBytes> header_{};
  std::size_t headerBytes_ = 0;
  std::string payload_;
};

}  // namespace farandole::net
