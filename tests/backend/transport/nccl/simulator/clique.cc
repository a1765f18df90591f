#include "tests/backend/transport/nccl/simulator/clique.h"

#include <algorithm>
#include <cstring>

#include "tests/backend/transport/nccl/simulator/collectives.h"
#include "tests/backend/transport/nccl/simulator/communicator.h"

namespace farandole::testing {

Clique::Clique(Core& core, std::string name, std::vector<Communicator*> members)
    : core_(core), name_(std::move(name)), members_(std::move(members)) {}

bool Clique::lost(int rank) const {
  return std::any_of(members_.begin(), members_.end(),
                     [&](const Communicator* member) { return member->rank != rank && !core_.alive(member->device); });
}

bool Clique::reachable(int rank) const {
  const Communicator& member = *members_[static_cast<std::size_t>(rank)];
  return core_.alive(member.device) && member.usable();
}

void Clique::arrive(Kernel& kernel, std::uint64_t place) {
  CollectiveSite& site = collectives_[place];
  if (!site.arrived.empty() && !sameCollective(kernel, *site.arrived.begin()->second)) site.broken = true;
  site.arrived[kernel.communicator().rank] = &kernel;
  if (site.broken || site.arrived.size() < members_.size() || lost(-1)) return;
  std::vector<const CollectiveCall*> calls;
  for (const auto& [rank, arrived] : site.arrived) calls.push_back(&arrived->collective());
  runCollective(calls);
  for (const auto& [rank, arrived] : site.arrived) arrived->collectiveDone();
  collectives_.erase(place);
}

bool Clique::sameCollective(Kernel& kernel, Kernel& first) {
  const auto text = [](Kernel& of) {
    return "rank " + std::to_string(of.communicator().rank) + " " + of.collective().text() + " (" +
           std::to_string(of.nextCollective() + 1) + " of " + std::to_string(of.plan().collectives.size()) + ")";
  };
  const bool sameGroup = kernel.nextCollective() == first.nextCollective() &&
                         kernel.plan().collectives.size() == first.plan().collectives.size();
  if (sameGroup && kernel.collective().matches(first.collective())) return true;
  core_.violation("kernel", (sameGroup ? "different collectives on '" : "asymmetric grouping of collectives on '") +
                                name_ + "': " + text(first) + ", " + text(kernel));
  return false;
}

void Clique::arrive(Kernel& kernel, const MessagePlace& place, bool sends) {
  MessageSite& site = messages_[place];
  (sends ? site.sender : site.receiver) = &kernel;
  if (site.sender == nullptr || site.receiver == nullptr || !reachable(place.sender) || !reachable(place.receiver)) {
    return;
  }
  const auto sent = site.sender->plan().with(place.receiver, true);
  const auto received = site.receiver->plan().with(place.sender, false);
  if (!sameMessages(place, sent, received)) return;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    if (sent[i].bytes > 0) std::memmove(received[i].buffer, sent[i].buffer, sent[i].bytes);
  }
  Kernel& sender = *site.sender;
  Kernel& receiver = *site.receiver;
  messages_.erase(place);
  sender.messagesDone();
  receiver.messagesDone();
}

bool Clique::sameMessages(const MessagePlace& place, const std::vector<MessageCall>& sent,
                          const std::vector<MessageCall>& received) {
  const std::string pair =
      " on '" + name_ + "' from rank " + std::to_string(place.sender) + " to " + std::to_string(place.receiver) + ": ";
  if (sent.size() != received.size()) {
    core_.violation("kernel", "asymmetric grouping" + pair + std::to_string(sent.size()) + " sent in one group, " +
                                  std::to_string(received.size()) + " received");
    return false;
  }
  for (std::size_t i = 0; i < sent.size(); ++i) {
    if (sent[i].bytes == received[i].bytes) continue;
    core_.violation("kernel", "different sizes" + pair + std::to_string(sent[i].bytes) + " bytes sent, " +
                                  std::to_string(received[i].bytes) + " received");
    return false;
  }
  return true;
}

void Clique::endKernels(int rank) {
  Communicator& member = *members_[static_cast<std::size_t>(rank)];
  for (Kernel* kernel : member.pending) kernel->abort();
  member.pending.clear();
  // Its place stays empty, so that the others stay stuck there.
  for (auto& [place, site] : collectives_) {
    if (site.arrived.erase(rank) > 0) site.broken = true;
  }
  for (auto& [place, site] : messages_) {
    if (place.sender == rank) site.sender = nullptr;
    if (place.receiver == rank) site.receiver = nullptr;
  }
}

std::vector<Clique::Connection> Clique::connect(int rank, const KernelPlan& plan) {
  std::vector<Connection> owed;
  for (const MessageCall& call : plan.messages) {
    const int from = call.sends ? rank : call.peer;
    const int to = call.sends ? call.peer : rank;
    connected_.insert({from, to, !call.sends});
    owed.push_back({from, to, call.sends});
  }
  if (!plan.collectives.empty()) {
    connected_.insert({rank, -1, false});
    for (int other = 0; other < size(); ++other) owed.push_back({other, -1, false});
  }
  std::sort(owed.begin(), owed.end());
  owed.erase(std::unique(owed.begin(), owed.end()), owed.end());
  return owed;
}

std::size_t Clique::countConnections(int rank) const {
  return static_cast<std::size_t>(std::count_if(connected_.begin(), connected_.end(), [rank](const Connection& side) {
    return (side.receiving ? side.to : side.from) == rank;
  }));
}

}  // namespace farandole::testing
