#include "backend/collective/communicator.h"

#include <cassert>

namespace farandole::collective {

using transport::ProgressEngine;

Communicator::Communicator(transport::Connections& connections, std::shared_ptr<void> keepAlive, int rank,
                           std::vector<Member> members)
    : connections_(connections),
      keepAlive_(std::move(keepAlive)),
      rank_(rank),
      members_(std::move(members)),
      peers_(members_.size()) {
  engine().addListener(*this);
}

Communicator::~Communicator() {
  assert(pending_ == nullptr);  // operations in flight keep their communicator
  engine().removeListener(*this);
}

void Communicator::abort(const Status& status) {
  ProgressEngine::Access access(engine());
  failAll(status);
}

void Communicator::failAll(const Status& status) {
  if (!aborted_) return;
  aborted_ = status;
  failPending([&](Operation&) { return status; });
}

void Communicator::connectHost() {
  ProgressEngine::Access access(engine());
  for (int rank = 0; rank < size(); ++rank) {
    const std::string& host = members_[rank].hostIdentity;
    // One that cannot be reached says so when it is used.
    if (rank != rank_ && !host.empty() && host == members_[rank_].hostIdentity) (void)peerOf(rank);
  }
}

void Communicator::timeOut(Operation& operation, std::chrono::milliseconds timeout) {
  ProgressEngine::Access access(engine());
  operation.fail(Status::timeout("not done after " + std::to_string(timeout.count()) + " ms"));
}

std::string Communicator::describe(int rank) const {
  if (rank == kAnySource) return "any rank";
  const Member& member = members_[rank];
  return "rank " + std::to_string(rank) + " (host " + member.host + ", pid " + std::to_string(member.pid) + ")";
}

std::string Communicator::transportOf(int rank) {
  ProgressEngine::Access access(engine());
  const Result<transport::PeerId> peer = peerOf(rank);
  return peer ? access.transport().describe(*peer) : peer.status().toString();
}

Result<transport::PeerId> Communicator::peerOf(int rank) {
  Peer& peer = peers_[rank];
  if (!peer.connected) {
    Result<transport::PeerId> id = connections_.connect(members_[rank].address);
    if (!id) return id;
    peer.id = *id;
    peer.connected = true;
    peer.failure = engine().transport().failure(*id);  // it may have come and gone before
  }
  return peer.id;
}

void Communicator::send(int peer, p2p::MessageKind kind, std::uint32_t tag, const void* data, std::size_t bytes,
                        Message& message) {
  const Result<transport::PeerId> id = peerOf(peer);
  if (!id) {
    message.status = id.status();
    message.onDone(message);
    return;
  }
  engine().transport().send(*id, p2p::makeTag(members_[peer].group, kind, rank_, tag), data, bytes, message);
}

void Communicator::recv(int peer, p2p::MessageKind kind, std::uint32_t tag, void* data, std::size_t bytes,
                        Message& message) {
  const int source = peer == kAnySource ? 0 : peer;
  const std::uint64_t mask = peer == kAnySource ? p2p::kAnySourceMask : p2p::kExactMask;
  transport::PeerId from = transport::kAnyPeer;
  if (peer != kAnySource) {
    const Result<transport::PeerId> id = peerOf(peer);
    if (!id) {
      message.status = id.status();
      message.onDone(message);
      return;
    }
    from = *id;
  }
  engine().transport().recv(from, p2p::makeTag(members_[rank_].group, kind, source, tag), mask, data, bytes, message);
  // What a peer sent before it failed can still be received; nothing more will come.
  if (message.isPending && peer != kAnySource && !peers_[peer].failure) {
    message.operation->fail(peers_[peer].failure.wrap(describe(peer) + " is gone"));
  }
}

void Communicator::add(Operation& operation) {
  operation.previous_ = nullptr;
  operation.next_ = pending_;
  if (pending_ != nullptr) pending_->previous_ = &operation;
  pending_ = &operation;
}

void Communicator::remove(Operation& operation) {
  (operation.previous_ != nullptr ? operation.previous_->next_ : pending_) = operation.next_;
  if (operation.next_ != nullptr) operation.next_->previous_ = operation.previous_;
}

void Communicator::failPending(const std::function<Status(Operation&)>& select) {
  // Failing one may complete and remove it, and it alone.
  for (Operation* operation = pending_; operation != nullptr;) {
    Operation* const next = operation->next_;
    if (!operation->isDone()) {
      if (Status status = select(*operation); !status) operation->fail(status);
    }
    operation = next;
  }
}

void Communicator::peerFailed(transport::PeerId id, const Status& status) {
  for (int rank = 0; rank < size(); ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.connected || peer.id != id) continue;
    peer.failure = status;
    if (status.code() == StatusCode::kPeerFailed) {
      failAll(status.wrap(describe(rank) + " failed"));
      continue;
    }
    failPending([&](Operation& operation) {
      for (const Message& message : operation.messages()) {
        if (message.isPending && message.peer == rank) return status.wrap(describe(rank) + " is gone");
      }
      return Status::ok();
    });
  }
}

void Communicator::checkDeadlines(transport::Clock::time_point now) {
  failPending([&](Operation& operation) {
    return now >= operation.deadline() ? Status::timeout("not done when its timeout came") : Status::ok();
  });
}

}  // namespace farandole::collective
