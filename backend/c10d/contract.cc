#include "backend/c10d/contract.h"

namespace farandole::backend {
// 0 is left to messages that do not say what they are made of.
std::uint32_t elementOf(at::ScalarType type) {
  static_assert(static_cast<std::uint32_t>(at::ScalarType::NumOptions) <= p2p::kMaxElement);
  return 1 + static_cast<std::uint32_t>(c10::isComplexType(type) ? c10::toRealValueType(type) : type);
}

// The element may be one that a newer torch has sent.
std::string describeElements(std::uint32_t element, std::size_t bytes, const std::string& shape) {
  const std::string size = " (" + std::to_string(bytes) + " bytes" + shape + ")";
  if (element == 0 || element > static_cast<std::uint32_t>(at::ScalarType::Undefined)) {
    return "dtype number " + std::to_string(element) + size;
  }
  const auto type = static_cast<at::ScalarType>(element - 1);
  return std::to_string(bytes / c10::elementSize(type)) + " x " + c10::toString(type) + size;
}

Status describeMismatch(const collective::Communicator& communicator, const collective::Message& message,
                        const Posted& posted) {
  const char* const theirs = message.isSend ? " receives " : " sent ";
  const char* const ours = message.isSend ? " sent " : " receives ";
  return Status::invalidArgument(communicator.describe(message.peer) + theirs +
                                 describeElements(p2p::elementOf(message.tag), message.bytes) + " with tag " +
                                 std::to_string(posted.tag) + ", " + communicator.describe(communicator.rank()) + ours +
                                 describeElements(elementOf(posted.type), posted.bytes, posted.shape) +
                                 "; expected the same dtype and as many elements on both sides");
}

}  // namespace farandole::backend
