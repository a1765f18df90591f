#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/common/status.h"

namespace farandole::net {

// Where a control plane is reached: what its process publishes. Pure but for
// the functions that ask the machine, which say so.
struct ControlAddress {
  std::uint64_t plane = 0;  // random: tells this plane from whoever else answers at the address
  std::uint16_t port = 0;
  std::string machine;             // equal where loopback reaches it; empty when it listens on one interface only
  std::vector<std::string> hosts;  // IP addresses, best first

  std::string encode() const;
  static Result<ControlAddress> decode(std::string_view text);

  // What to connect to, from a process on `machine`: loopback between processes of one machine, which holds
  // when an interface goes down.
  std::vector<std::string> hostsFrom(std::string_view fromMachine) const;
};

// One network interface's address, as the machine lists it.
struct InterfaceAddress {
  std::string interface;
  std::string host;
  bool loopback = false;
  bool v6 = false;
};

// The choice of FARANDOLE_SOCKET_IFNAME, in NCCL's syntax: "eth,ib" (prefixes),
// "=eth0" (exact), "^docker" (all but). Loopback is left out unless named or alone.
// IPv4 first, else in the order of the machine.
std::vector<InterfaceAddress> chooseInterfaces(const std::vector<InterfaceAddress>& all, std::string_view names);

// Ask the machine.
std::vector<InterfaceAddress> interfaceAddresses();  // those that are up; no IPv6 link-local ones
std::string machineId();                             // of this boot and network namespace

}  // namespace farandole::net
