#include "pipeline/runtime/packet.h"

#include <gtest/gtest.h>

#include <string>

namespace farandole::pipeline {
namespace {

std::string contents(const at::Tensor& packet) {
  return {static_cast<const char*>(packet.data_ptr()), static_cast<std::size_t>(packet.numel())};
}

TEST(Packet, HasWholeBlocksAndZerosBehindItsBytes) {
  for (const std::size_t size : {1u, 255u, 256u, 257u}) {
    const std::string bytes(size, 'x');
    const at::Tensor packet = makePacket(bytes.data(), bytes.size());
    EXPECT_EQ(packet.numel(), size > 256 ? 512 : 256);
    EXPECT_EQ(contents(packet), bytes + std::string(packet.numel() - size, '\0'));
    EXPECT_FALSE(isPacketOfFailure(packet));
    EXPECT_TRUE(isPacketOfFailure(at::zeros_like(packet)));
  }
}

TEST(Packet, FitsIntoTheSizeOfTheStepBeforeOrSaysWhyNot) {
  const std::string bytes(300, 'x');
  at::Tensor packet = makePacket(bytes.data(), bytes.size());
  EXPECT_TRUE(fitPacket(packet, 1024).isOk());
  EXPECT_EQ(contents(packet), bytes + std::string(724, '\0'));
  const Status status = fitPacket(packet, 512);
  EXPECT_NE(status.toString().find("takes 1024 bytes, expected at most 512"), std::string::npos) << status.toString();
}

}  // namespace
}  // namespace farandole::pipeline
