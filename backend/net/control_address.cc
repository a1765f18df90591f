#include "backend/net/control_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <utility>

#include "backend/net/wire.h"

namespace farandole::net {
namespace {

constexpr std::string_view kMagic = "farandole-control-1";
constexpr std::size_t kMaxHosts = 64;

bool matches(const std::string& interface, std::string_view names) {
  const bool exclude = !names.empty() && names.front() == '^';
  if (exclude) names.remove_prefix(1);
  const bool exact = !names.empty() && names.front() == '=';
  if (exact) names.remove_prefix(1);
  bool found = false;
  while (!names.empty()) {
    const std::string_view name = names.substr(0, names.find(','));
    names.remove_prefix(std::min(names.size(), name.size() + 1));
    if (name.empty()) continue;
    found = found || (exact ? interface == name : std::string_view(interface).substr(0, name.size()) == name);
  }
  return found != exclude;
}

}  // namespace

std::string ControlAddress::encode() const {
  WireWriter writer;
  writer.text(kMagic).number(plane).number(port).text(machine).number(static_cast<std::uint8_t>(hosts.size()));
  for (const std::string& host : hosts) writer.text(host);
  return writer.take();
}

Result<ControlAddress> ControlAddress::decode(std::string_view text) {
  WireReader reader(text);
  ControlAddress address;
  const bool ours = reader.text() == kMagic;
  address.plane = reader.number<std::uint64_t>();
  address.port = reader.number<std::uint16_t>();
  address.machine = reader.text();
  const auto hosts = reader.number<std::uint8_t>();
  for (int i = 0; i < hosts && reader.ok(); ++i) address.hosts.emplace_back(reader.text());
  if (!ours || !reader.complete() || hosts == 0 || hosts > kMaxHosts || address.port == 0) {
    return Status::invalidArgument("a control address of " + std::to_string(text.size()) +
                                   " bytes is malformed: expected what ControlPlane::address() gave");
  }
  return address;
}

std::vector<std::string> ControlAddress::hostsFrom(std::string_view fromMachine) const {
  if (!machine.empty() && machine == fromMachine) return {"127.0.0.1", "::1"};
  return hosts;
}

std::vector<InterfaceAddress> chooseInterfaces(const std::vector<InterfaceAddress>& all, std::string_view names) {
  std::vector<InterfaceAddress> chosen;
  const bool named = !names.empty() && names.front() != '^';
  for (const bool loopback : {false, true}) {
    if (loopback && !named && !chosen.empty()) break;
    for (const InterfaceAddress& address : all) {
      if (address.loopback == loopback && (names.empty() || matches(address.interface, names))) {
        chosen.push_back(address);
      }
    }
  }
  std::stable_sort(chosen.begin(), chosen.end(),
                   [](const InterfaceAddress& a, const InterfaceAddress& b) { return !a.v6 && b.v6; });
  if (chosen.size() > kMaxHosts) chosen.resize(kMaxHosts);
  return chosen;
}

std::vector<InterfaceAddress> interfaceAddresses() {
  std::vector<InterfaceAddress> found;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    std::array<char, INET6_ADDRSTRLEN> text{};
    const int family = entry->ifa_addr->sa_family;
    if (family == AF_INET) {
      ::inet_ntop(family, &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr, text.data(), text.size());
    } else if (family == AF_INET6) {
      const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;
      ::inet_ntop(family, &address, text.data(), text.size());
    } else {
      continue;
    }
    found.push_back({entry->ifa_name, text.data(), (entry->ifa_flags & IFF_LOOPBACK) != 0, family == AF_INET6});
  }
  ::freeifaddrs(list);
  return found;
}

std::string machineId() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> space{};
  const ssize_t size = ::readlink("/proc/self/ns/net", space.data(), space.size() - 1);
  if (boot.empty() || size <= 0) return {};
  return boot + "/" + std::string(space.data(), static_cast<std::size_t>(size));
}

}  // namespace farandole::net
