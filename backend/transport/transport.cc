#include "backend/transport/transport.h"

namespace farandole::transport {

Status Transport::shareMemory(PeerId, std::uint64_t, int) {
  return Status::unavailable(std::string(name()) + " does not share memory");
}

Status Transport::readMemory(PeerId, void*, const void*, std::size_t) {
  return Status::unavailable(std::string(name()) + " does not read the memory of peers");
}

Result<Descriptor> Transport::takeSharedMemory(PeerId, std::uint64_t) { return Descriptor(); }

}  // namespace farandole::transport
