#pragma once

#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend/collective/algorithms.h"
#include "backend/collective/communicator.h"
#include "backend/collective/program.h"
#include "backend/transport/loopback/loopback_transport.h"
#include "backend/transport/routing/routing_transport.h"
#include "backend/transport/shm/shm_transport.h"

namespace farandole::collective::testing {

// A group whose ranks live in this process, each with a transport and a loop of its own.
class Group {
 public:
  // Over loopback, which takes messages up to `eagerBytes` at once; kSharedMemory: over shared memory;
  // kUnreadable: the same where no rank can read another one's memory; kReading: the same where that is cheap.
  Group(int size, std::size_t eagerBytes) : Group(eagerBytes) {
    const bool isShared = eagerBytes >= kReading;
    std::vector<Member> members;
    for (int rank = 0; rank < size; ++rank) {
      auto& loop = *loops_.emplace_back(std::make_unique<net::EventLoop>("rank-" + std::to_string(rank)));
      auto transport = isShared ? makeShm(eagerBytes == kUnreadable ? SingleCopy::kOff
                                          : eagerBytes == kReading  ? SingleCopy::kEager
                                                                    : SingleCopy::kLazy)
                                : fabric_->makeTransport();
      members.push_back(
          {transport->address(), static_cast<std::uint32_t>(rank) + 1, "host", rank, isShared ? "host" : "", ""});
      connections_.push_back(std::make_unique<transport::Connections>(std::move(transport), loop));
    }
    for (int rank = 0; rank < size; ++rank) {
      communicators_.push_back(std::make_shared<Communicator>(*connections_[rank], nullptr, rank, members));
    }
    connectHosts();
  }
  // Rank r is on host hosts[r]: shared memory there, loopback between the hosts.
  Group(const std::vector<int>& hosts, std::size_t eagerBytes, const AlgorithmTable& table) : Group(eagerBytes) {
    std::vector<Member> members;
    std::vector<std::string> networkAddresses;
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      auto& loop = *loops_.emplace_back(std::make_unique<net::EventLoop>("rank-" + std::to_string(rank)));
      auto transport = transport::RoutingTransport::create(
          makeShm(SingleCopy::kAuto),
          [this]() -> Result<std::unique_ptr<transport::Transport>> { return fabric_->makeTransport(); });
      if (!transport) throw std::runtime_error(transport.status().toString());
      const std::string host = "host-" + std::to_string(hosts[rank]);
      members.push_back({(*transport)->address(), static_cast<std::uint32_t>(rank) + 1, host, static_cast<int>(rank),
                         host, table.overrides()});
      networkAddresses.push_back((*transport)->networkAddress().value());
      connections_.push_back(std::make_unique<transport::Connections>(std::move(transport).value(), loop));
    }
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      std::vector<Member> seen = members;
      for (std::size_t other = 0; other < hosts.size(); ++other) {
        if (hosts[other] != hosts[rank]) seen[other].address = networkAddresses[other];
      }
      communicators_.push_back(
          std::make_shared<Communicator>(*connections_[rank], nullptr, static_cast<int>(rank), std::move(seen), table));
    }
    connectHosts();
  }
  static constexpr std::size_t kSharedMemory = ~std::size_t{0};
  static constexpr std::size_t kUnreadable = kSharedMemory - 1;
  static constexpr std::size_t kReading = kSharedMemory - 2;

  ~Group() {
    for (auto& loop : loops_) loop->stop();
    communicators_.clear();
  }

  // It is gone as a process that has ended is.
  void end(int rank) {
    loops_[rank]->stop();
    communicators_[rank].reset();
    connections_[rank].reset();
  }

  const std::shared_ptr<Communicator>& operator[](int rank) const { return communicators_[rank]; }
  int size() const { return static_cast<int>(communicators_.size()); }

 private:
  // What throws after it is cleaned up after by the destructor, which stops the loops first.
  explicit Group(std::size_t eagerBytes) : fabric_(transport::LoopbackFabric::create(eagerBytes)) {}

  using SingleCopy = transport::ShmOptions::SingleCopy;

  // Each waits for the others of its host.
  void connectHosts() {
    std::vector<std::future<Status>> connected;
    for (auto& communicator : communicators_) {
      connected.push_back(std::async(std::launch::async, [&communicator] {
        return communicator->connectHost(transport::Clock::now() + std::chrono::seconds(10));
      }));
    }
    std::string errors;
    for (auto& one : connected) {
      if (const Status status = one.get(); !status) errors += status.toString() + "; ";
    }
    if (!errors.empty()) throw std::runtime_error(errors);
  }
  static std::unique_ptr<transport::Transport> makeShm(SingleCopy singleCopy) {
    auto transport = transport::ShmTransport::create({.singleCopy = singleCopy});
    if (!transport) throw std::runtime_error(transport.status().toString());
    return std::move(transport).value();
  }

  std::shared_ptr<transport::LoopbackFabric> fabric_;
  std::vector<std::unique_ptr<net::EventLoop>> loops_;
  std::vector<std::unique_ptr<transport::Connections>> connections_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
};

// An operation kept alive by shared_ptr, with a program of one's own.
class TestOperation final : public ProgramOperation, public std::enable_shared_from_this<TestOperation> {
 public:
  explicit TestOperation(std::shared_ptr<Communicator> communicator) : ProgramOperation(std::move(communicator)) {}

  static std::shared_ptr<TestOperation> launch(const std::shared_ptr<Communicator>& communicator, Program program,
                                               std::uint32_t sequence,
                                               std::chrono::milliseconds timeout = std::chrono::milliseconds::max()) {
    auto operation = std::make_shared<TestOperation>(communicator);
    operation->setTimeout(timeout);
    operation->setProgram(std::move(program), sequence);
    transport::ProgressEngine::Access access(communicator->engine());
    operation->start();
    return operation;
  }

 protected:
  std::string describe() const override { return "test operation"; }
  void retain() override { self_ = shared_from_this(); }
  void release() override { self_.reset(); }

 private:
  std::shared_ptr<TestOperation> self_;
};

}  // namespace farandole::collective::testing
