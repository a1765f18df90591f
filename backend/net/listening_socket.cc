#include "backend/net/listening_socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "backend/net/fork_guard.h"
#include "backend/net/token_proof.h"

namespace farandole::net {
namespace {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = sizeof(sockaddr_storage);

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  std::uint16_t port() const {
    return ntohs(family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                                      : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
  }
};

SocketAddress anyAddress(int family) {
  SocketAddress any;
  any.storage.ss_family = static_cast<sa_family_t>(family);  // the rest is zero: the wildcard, port 0
  any.size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  return any;
}

Status systemError(const std::string& what) { return Status::unavailable(what + ": " + std::strerror(errno)); }

// Numbers and names alike; the first address that the name has.
Result<SocketAddress> resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &list); error != 0 || list == nullptr) {
    return Status::invalidArgument("'" + host + "' is no address or name of this host: " + ::gai_strerror(error));
  }
  SocketAddress address;
  std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
  address.size = list->ai_addrlen;
  ::freeaddrinfo(list);
  return address;
}

void closeDescriptor(int descriptor) {
  std::lock_guard lock(guardMutex());
  forgetGuarded(descriptor);
  ::close(descriptor);
}

Result<ListeningSocket> listenOn(SocketAddress address) {
  ListeningSocket listening;
  listening.descriptor = openGuarded(address.family());
  if (listening.descriptor < 0) return systemError("no socket for the control plane");
  const int no = 0;
  if (address.family() == AF_INET6) {
    ::setsockopt(listening.descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  }
  if (::bind(listening.descriptor, address.get(), address.size) != 0 ||
      ::listen(listening.descriptor, SOMAXCONN) != 0 ||
      ::getsockname(listening.descriptor, address.get(), &address.size) != 0) {
    const Status status = systemError("the control plane cannot listen");
    closeDescriptor(listening.descriptor);
    return status;
  }
  listening.address.plane = randomNumber();
  listening.address.port = address.port();
  return listening;
}

Result<ListeningSocket> listenOnHost(const std::string& host) {
  Result<SocketAddress> address = resolve(host);
  if (!address) return address.status();
  Result<ListeningSocket> listening = listenOn(*address);
  if (!listening) return listening.status();
  std::array<char, NI_MAXHOST> text{};
  ::getnameinfo(address->get(), address->size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  listening->address.hosts = {text.data()};
  return listening;
}

}  // namespace

Result<ListeningSocket> openListeningSocket() {
  if (const std::string host = environment("FARANDOLE_CONTROL_HOST"); !host.empty()) {
    Result<ListeningSocket> listening = listenOnHost(host);
    if (!listening) return listening.status().wrap("FARANDOLE_CONTROL_HOST is '" + host + "'");
    return listening;
  }
  const std::vector<InterfaceAddress> all = interfaceAddresses();
  const std::string names = environment("FARANDOLE_SOCKET_IFNAME");
  const std::vector<InterfaceAddress> chosen = chooseInterfaces(all, names);
  if (chosen.empty() && names.empty()) return Status::unavailable("no network interface is up, not even loopback");
  if (chosen.empty()) {
    std::string there;
    for (const InterfaceAddress& address : all) there += (there.empty() ? "" : ", ") + address.interface;
    return Status::invalidArgument(
        "FARANDOLE_SOCKET_IFNAME is '" + names +
        "'; expected the name of an interface that is up and has an address (there are: " + there + ")");
  }
  if (!names.empty()) return listenOnHost(chosen.front().host);
  Result<ListeningSocket> listening = listenOn(anyAddress(AF_INET6));
  if (!listening) listening = listenOn(anyAddress(AF_INET));  // a kernel without IPv6
  if (!listening) return listening.status();
  listening->address.machine = machineId();
  for (const InterfaceAddress& address : chosen) listening->address.hosts.push_back(address.host);
  return listening;
}

}  // namespace farandole::net
