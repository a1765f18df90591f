// The kinds of transports, for the tests that run over each of them.
#include <stdexcept>
#include <utility>

#include "backend/transport/loopback/loopback_transport.h"
#include "backend/transport/routing/routing_transport.h"
#include "backend/transport/shm/shm_transport.h"
#include "backend/transport/ucx/ucx_transport.h"
#include "tests/backend/transport/conformance.h"

namespace farandole::transport {
namespace {

std::function<std::unique_ptr<Transport>()> loopbackFactory(std::size_t eagerBytes) {
  auto fabric = LoopbackFabric::create(eagerBytes);
  return [fabric] { return fabric->makeTransport(); };
}

std::function<std::unique_ptr<Transport>()> ucxFactory(UcxMemory memory) {
  return [memory] {
    auto transport = UcxTransport::create(memory);
    if (!transport) throw std::runtime_error(transport.status().toString());
    return std::move(transport).value();
  };
}

std::function<std::unique_ptr<Transport>()> shmFactory(const ShmOptions& options) {
  return [options] {
    auto transport = ShmTransport::create(options);
    if (!transport) throw std::runtime_error(transport.status().toString());
    return std::move(transport).value();
  };
}

// With both transports open.
std::unique_ptr<Transport> makeRouted() {
  auto routing = RoutingTransport::create(shmFactory({})(), [] { return UcxTransport::create(); });
  if (!routing) throw std::runtime_error(routing.status().toString());
  if (auto network = (*routing)->networkAddress(); !network) throw std::runtime_error(network.status().toString());
  return std::move(routing).value();
}

}  // namespace

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> kinds = {
      {"LoopbackRendezvous", [] { return loopbackFactory(0); }, 1, true},
      {"LoopbackEager", [] { return loopbackFactory(8192); }, 8193, true},
      {"Shm", [] { return shmFactory({.singleCopy = ShmOptions::SingleCopy::kLazy}); }, 8193},
      {"ShmSmallRing", [] { return shmFactory({.ringBytes = 64 << 10}); }, 8193},
      {"ShmNoSingleCopy", [] { return shmFactory({.singleCopy = ShmOptions::SingleCopy::kOff}); }, 8193},
      {"ShmEager", [] { return shmFactory({.singleCopy = ShmOptions::SingleCopy::kEager}); }, 8193},
      {"Routed", []() -> std::function<std::unique_ptr<Transport>()> { return makeRouted; }, 8193},
      {"Ucx", [] { return ucxFactory(UcxMemory::kHost); }, SIZE_MAX},
      {"UcxDetectsMemory", [] { return ucxFactory(UcxMemory::kDetected); }, SIZE_MAX}};
  return kinds;
}

}  // namespace farandole::transport
