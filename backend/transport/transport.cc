#include "backend/transport/transport.h"

namespace farandole::transport {

Status Transport::shareMemory(PeerId, std::uint64_t, int) {
  return Status::unavailable(std::string(name()) + " does not share memory");
}

Descriptor Transport::takeSharedMemory(PeerId, std::uint64_t) { return {}; }

}  // namespace farandole::transport
