// Two transports of a kind, for the tests that run over each of them; the kinds are in conformance_kinds.cc.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/transport/transport.h"

namespace farandole::transport {

using namespace std::chrono_literals;

// Makes transports that can talk to each other.
struct Kind {
  std::string name;
  std::function<std::function<std::unique_ptr<Transport>()>()> makeFactory;
  // From how many bytes on a sender is told that its receiver wants another message.
  std::size_t answersFrom;
  // Both ends are in one process.
  bool isInProcess = false;
  // How much of a peer's messages a process keeps that no receive has wanted yet; 0: more than a test sends.
  std::size_t unexpectedBytes = 0;
};

const std::vector<Kind>& kinds();

struct Tracked : Request {
  bool done = false;
  Tracked() {
    onDone = [](Request& request) { static_cast<Tracked&>(request).done = true; };
  }
};

class TransportConformance : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    auto make = GetParam().makeFactory();
    a_ = make();
    b_ = make();
    Result<PeerId> peer = a_->connect(b_->address());
    ASSERT_TRUE(peer) << peer.status().toString();
    b_of_a_ = *peer;
    peer = b_->connect(a_->address());
    ASSERT_TRUE(peer);
    a_of_b_ = *peer;
  }

  bool progressUntil(const std::function<bool()>& done, std::chrono::milliseconds limit = 10s) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!done() && std::chrono::steady_clock::now() < end) {
      a_->progress();
      b_->progress();
    }
    return done();
  }

  bool waits_[2] = {true, true};  // for watchWaiter
  std::unique_ptr<Transport> a_;
  std::unique_ptr<Transport> b_;
  PeerId b_of_a_{};
  PeerId a_of_b_{};
};

}  // namespace farandole::transport
