#include "backend/net/frame.h"

#include <algorithm>
#include <utility>

#include "backend/net/wire.h"

namespace farandole::net {

std::string encodeFrame(FrameType type, std::string_view payload) {
  WireWriter frame;
  frame.number(static_cast<std::uint32_t>(payload.size()))
      .number(kFrameVersion)
      .number(static_cast<std::uint8_t>(type));
  return frame.take().append(payload);
}

std::size_t FrameReader::payloadBytes() const {
  return WireReader({header_.data(), header_.size()}).number<std::uint32_t>();
}

Status FrameReader::checkHeader() const {
  const auto version = static_cast<std::uint8_t>(header_[4]);
  const auto type = static_cast<std::uint8_t>(header_[5]);
  if (version != kFrameVersion) {
    return Status::internal("a control frame of version " + std::to_string(version) + ", expected " +
                            std::to_string(kFrameVersion));
  }
  if (type < static_cast<std::uint8_t>(FrameType::kHello) || type > static_cast<std::uint8_t>(FrameType::kBye)) {
    return Status::internal("a control frame of the unknown type " + std::to_string(type));
  }
  if (payloadBytes() > maxPayload_) {
    return Status::internal("a control frame of " + std::to_string(payloadBytes()) + " bytes, allowed are " +
                            std::to_string(maxPayload_));
  }
  return Status::ok();
}

Result<std::optional<Frame>> FrameReader::take(std::string_view& bytes) {
  if (headerBytes_ < kFrameHeaderBytes) {
    const std::size_t taken = std::min(kFrameHeaderBytes - headerBytes_, bytes.size());
    std::copy_n(bytes.data(), taken, header_.data() + headerBytes_);
    headerBytes_ += taken;
    bytes.remove_prefix(taken);
    if (headerBytes_ < kFrameHeaderBytes) return std::optional<Frame>();
    FARANDOLE_RETURN_IF_ERROR(checkHeader());
    payload_.reserve(payloadBytes());
  }
  const std::size_t taken = std::min(payloadBytes() - payload_.size(), bytes.size());
  payload_.append(bytes.substr(0, taken));
  bytes.remove_prefix(taken);
  if (payload_.size() < payloadBytes()) return std::optional<Frame>();
  headerBytes_ = 0;
  return std::optional<Frame>(Frame{static_cast<FrameType>(header_[5]), std::exchange(payload_, {})});
}

}  // namespace farandole::net
