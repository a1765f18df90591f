#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "backend/transport/progress_engine.h"

namespace farandole::transport {

// The transport of a process and whom it is connected to. Shared by all groups
// of the process: two groups with a common peer use one connection.
class Connections {
 public:
  Connections(std::unique_ptr<Transport> transport, net::EventLoop& loop) : engine_(std::move(transport), loop) {}

  ProgressEngine& engine() { return engine_; }

  // Connects on first use, and anew where a connection has broken. With the transport held.
  Result<PeerId> connect(const std::string& address) {
    const auto known = peers_.find(address);
    if (known != peers_.end() && engine_.transport().failure(known->second)) return known->second;
    Result<PeerId> peer = engine_.transport().connect(address);
    if (peer) peers_.insert_or_assign(address, *peer);
    return peer;
  }

  // The peer is dead or out of reach (Transport::drop); whoever comes to its address later is connected anew. With the
  // transport held.
  void drop(PeerId peer, const Status& why) {
    std::erase_if(peers_, [peer](const auto& known) { return known.second == peer; });
    engine_.transport().drop(peer, why);
    engine_.notePosted();  // whoever sleeps must arm it again, and it may take some progress
  }

 private:
  ProgressEngine engine_;
  std::unordered_map<std::string, PeerId> peers_;
};

}  // namespace farandole::transport
