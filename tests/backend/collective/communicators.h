#pragma once

#include <memory>
#include <stdexcept>
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
  // kUnreadable: the same where no rank can read another one's memory; kReading: the same where two ranks that swap
  // read each other's.
  Group(int size, std::size_t eagerBytes) : Group(eagerBytes) {
    const bool isShared = eagerBytes >= kReading;
    std::vector<Member> members;
    for (int rank = 0; rank < size; ++rank) {
      auto& loop = *loops_.emplace_back(std::make_unique<net::EventLoop>("rank-" + std::to_string(rank)));
      auto transport = isShared ? makeShm(eagerBytes != kUnreadable) : fabric_->makeTransport();
      members.push_back(
          {transport->address(), static_cast<std::uint32_t>(rank) + 1, "host", rank, isShared ? "host" : "", ""});
      connections_.push_back(std::make_unique<transport::Connections>(std::move(transport), loop));
    }
    for (int rank = 0; rank < size; ++rank) {
      communicators_.push_back(std::make_shared<Communicator>(*connections_[rank], nullptr, rank, members));
    }
    connectHosts();
    if (isShared && eagerBytes != kUnreadable) settle();
    for (auto& communicator : communicators_) {
      if (eagerBytes == kReading) communicator->setReadsFrom(0);
    }
  }
  // Rank r is on host hosts[r]: shared memory there, loopback between the hosts.
  Group(const std::vector<int>& hosts, std::size_t eagerBytes, const AlgorithmTable& table) : Group(eagerBytes) {
    std::vector<Member> members;
    std::vector<std::string> networkAddresses;
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      auto& loop = *loops_.emplace_back(std::make_unique<net::EventLoop>("rank-" + std::to_string(rank)));
      auto transport = transport::RoutingTransport::create(
          makeShm(true),
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

  void connectHosts() {
    for (auto& communicator : communicators_) {
      const Status status = communicator->connectHost(transport::Clock::now() + std::chrono::seconds(10));
      if (!status) throw std::runtime_error(status.toString());
    }
  }
  // Until all know that they can read each other's memory.
  void settle();
  static std::unique_ptr<transport::Transport> makeShm(bool singleCopy) {
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

inline void Group::settle() {
  const auto deadline = transport::Clock::now() + std::chrono::seconds(10);
  for (std::uint32_t i = 0; size() > 1 && !communicators_[0]->topology().segment->everybodyReads(); ++i) {
    if (transport::Clock::now() > deadline) throw std::runtime_error("the ranks cannot read each other's memory");
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (auto& communicator : communicators_) {
      Program program;
      barrier(program, communicator->topology());
      operations.push_back(TestOperation::launch(communicator, std::move(program), 1'000'000 + i));
    }
    for (auto& operation : operations) {
      if (!operation->wait(transport::Clock::now() + std::chrono::seconds(10)) || !operation->status()) {
        throw std::runtime_error("the ranks do not meet: " + operation->status().toString());
      }
    }
  }
}

}  // namespace farandole::collective::testing
