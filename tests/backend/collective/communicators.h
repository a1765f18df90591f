#pragma once

#include <memory>
#include <vector>

#include "backend/collective/communicator.h"
#include "backend/collective/program.h"
#include "backend/transport/loopback/loopback_transport.h"

namespace farandole::collective::testing {

// A group whose ranks live in this process, each with a transport and a loop of its own.
class Group {
 public:
  Group(int size, std::size_t eagerBytes) : fabric_(transport::LoopbackFabric::create(eagerBytes)) {
    std::vector<Member> members;
    for (int rank = 0; rank < size; ++rank) {
      auto& loop = *loops_.emplace_back(std::make_unique<net::EventLoop>("rank-" + std::to_string(rank)));
      connections_.push_back(std::make_unique<transport::Connections>(fabric_->makeTransport(), loop));
      members.push_back({std::to_string(rank), static_cast<std::uint32_t>(rank) + 1, "host", rank, ""});
    }
    for (int rank = 0; rank < size; ++rank) {
      communicators_.push_back(std::make_shared<Communicator>(*connections_[rank], nullptr, rank, members));
    }
  }
  ~Group() {
    for (auto& loop : loops_) loop->stop();
    communicators_.clear();
  }

  const std::shared_ptr<Communicator>& operator[](int rank) const { return communicators_[rank]; }
  int size() const { return static_cast<int>(communicators_.size()); }

 private:
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
