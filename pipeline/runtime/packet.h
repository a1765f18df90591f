#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/common/status.h"

namespace farandole::pipeline {

// A stage may hand over more than tensors. What they make up together, and what else there is, it says in a packet: a
// tensor of bytes behind them, flagged in its meta. What the bytes mean is the stages' own affair, but for the first
// one, which is not 0: zeros are what a stage that failed sends in place of what is expected of it.
struct PacketNotes {
  struct Input {
    std::size_t numTensors = 0;  // of one edge, its packet included
    bool hasPacket = false;
  };

  // Of the forward that is called: by edge into the stage; empty when there are no packets.
  std::vector<Input> inputs;

  // Set by a forward whose last output is a packet.
  bool returned = false;
};

// Packets have sizes of whole blocks, so that small changes of what is in them do not change their size.
inline constexpr std::int64_t kPacketBlock = 256;

// A packet of these bytes and zeros behind them.
at::Tensor makePacket(const void* data, std::size_t size);

// With as many bytes as the packet of the step before; an error when it has more.
Status fitPacket(at::Tensor& packet, std::int64_t size);

bool isPacketOfFailure(const at::Tensor& packet);

}  // namespace farandole::pipeline
