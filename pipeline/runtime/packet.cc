#include "pipeline/runtime/packet.h"

#include <cstring>
#include <string>

namespace farandole::pipeline {

namespace {

at::Tensor copyOf(const void* data, std::size_t size, std::int64_t padded) {
  at::Tensor packet = at::zeros({padded}, at::kByte);
  std::memcpy(packet.data_ptr(), data, size);
  return packet;
}

}  // namespace

at::Tensor makePacket(const void* data, std::size_t size) {
  const auto blocks = (static_cast<std::int64_t>(size) + kPacketBlock - 1) / kPacketBlock;
  return copyOf(data, size, blocks * kPacketBlock);
}

Status fitPacket(at::Tensor& packet, std::int64_t size) {
  if (packet.numel() > size) {
    return Status::invalidArgument(
        "what the module returned beside tensors takes " + std::to_string(packet.numel()) +
        " bytes, expected at most " + std::to_string(size) +
        " as in the step before, whose inputs had the same shapes; the next step may have more");
  }
  if (packet.numel() < size) packet = copyOf(packet.data_ptr(), packet.numel(), size);
  return Status::ok();
}

bool isPacketOfFailure(const at::Tensor& packet) {
  return packet.numel() == 0 || *packet.data_ptr<std::uint8_t>() == 0;
}

}  // namespace farandole::pipeline
