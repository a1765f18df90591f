#pragma once

#include <ATen/ATen.h>

#include <string>

#include "backend/collective/communicator.h"

namespace farandole::backend {

// What a message is made of, in its tag (p2p/message_tag.h): the dtype, where complex
// numbers count as pairs of real ones, as torch.distributed sends them.
std::uint32_t elementOf(at::ScalarType type);

// "4 x Float (16 bytes)".
std::string describeElements(std::uint32_t element, std::size_t bytes, const std::string& shape = "");

// What this rank sends or receives by a message.
struct Posted {
  at::ScalarType type;
  std::uint32_t tag;
  std::size_t bytes;
  std::string shape;  // ", shape [2, 3]"; or nothing
};

// Names both sides of a message that is done and on which they disagree.
Status describeMismatch(const collective::Communicator& communicator, const collective::Message& message,
                        const Posted& posted);

}  // namespace farandole::backend
