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

// Less than a test sends ahead.
constexpr std::size_t kFewBytes = 64 << 10;

std::function<std::unique_ptr<Transport>()> ucxFactory(UcxMemory memory, std::size_t unexpectedBytes) {
  return [memory, unexpectedBytes] {
    auto transport = UcxTransport::create(memory, unexpectedBytes);
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
  auto routing = RoutingTransport::create(shmFactory({.unexpectedBytes = kFewBytes})(),
                                          [] { return UcxTransport::create(UcxMemory::kHost, kFewBytes); });
  if (!routing) throw std::runtime_error(routing.status().toString());
  if (auto network = (*routing)->networkAddress(); !network) throw std::runtime_error(network.status().toString());
  return std::move(routing).value();
}

}  // namespace

const std::vector<Kind>& kinds() {
  using SingleCopy = ShmOptions::SingleCopy;
  static const std::vector<Kind> kinds = {
      {"LoopbackRendezvous", [] { return loopbackFactory(0); }, 1, true},
      {"LoopbackEager", [] { return loopbackFactory(8192); }, 8193, true},
      {"Shm", [] { return shmFactory({.singleCopy = SingleCopy::kLazy}); }, 8193},
      {"ShmSmallRing", [] { return shmFactory({.ringBytes = 64 << 10, .unexpectedBytes = kFewBytes}); }, 8193, false,
       kFewBytes},
      {"ShmNoSingleCopy", [] { return shmFactory({.singleCopy = SingleCopy::kOff, .unexpectedBytes = kFewBytes}); },
       8193, false, kFewBytes},
      {"ShmEager", [] { return shmFactory({.singleCopy = SingleCopy::kEager}); }, 8193},
      {"Routed", []() -> std::function<std::unique_ptr<Transport>()> { return makeRouted; }, 8193, false, kFewBytes},
      {"Ucx", [] { return ucxFactory(UcxMemory::kHost, kUnexpectedBytes); }, SIZE_MAX},
      {"UcxFewUnexpected", [] { return ucxFactory(UcxMemory::kHost, kFewBytes); }, SIZE_MAX, false, kFewBytes},
      {"UcxDetectsMemory", [] { return ucxFactory(UcxMemory::kDetected, kUnexpectedBytes); }, SIZE_MAX}};
  return kinds;
}

}  // namespace farandole::transport
