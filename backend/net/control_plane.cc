#include "backend/net/control_plane.h"

#include <unistd.h>

#include <future>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "backend/common/text.h"
#include "backend/net/control_plane_impl.h"
#include "backend/net/token_proof.h"

namespace farandole::net {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMinToken = 16;

// A name may be used again after the group was left; its token is new then, and
// keeps the two apart on the wire.
std::string wireKey(const std::string& group, const std::string& token) {
  return group + '#' + hexText(proofOf(token, "key").substr(0, 8));
}

Status checkGroupArguments(const std::string& group, int rank, const std::vector<ControlMember>& members,
                           const std::string& token, const std::string& ownAddress) {
  if (group.empty() || group.size() > kMaxGroupKey - 32) {
    return Status::invalidArgument("group is a key of " + std::to_string(group.size()) + " bytes, expected 1 to " +
                                   std::to_string(kMaxGroupKey - 32));
  }
  if (rank < 0 || rank >= static_cast<int>(members.size())) {
    return Status::invalidArgument("rank is " + std::to_string(rank) + ", expected 0 to " +
                                   std::to_string(members.size()) + " - 1");
  }
  if (token.size() < kMinToken) {
    return Status::invalidArgument("token has " + std::to_string(token.size()) + " bytes, expected at least " +
                                   std::to_string(kMinToken) + " random ones");
  }
  if (members[static_cast<std::size_t>(rank)].address != ownAddress) {
    return Status::invalidArgument("members[" + std::to_string(rank) +
                                   "].address is not this process's, expected what address() gave");
  }
  return Status::ok();
}

}  // namespace

Result<std::unique_ptr<ControlPlane>> ControlPlane::listen(EventLoop& loop, ControlTimes times) {
  Result<ListeningSocket> listening = openListeningSocket();
  if (!listening) return listening.status();
  auto impl = std::make_shared<Impl>(loop, times, std::move(listening).value());
  loop.post([impl] { impl->start(); });
  std::string address = impl->address().encode();
  return std::unique_ptr<ControlPlane>(new ControlPlane(std::move(impl), std::move(address)));
}

ControlPlane::ControlPlane(std::shared_ptr<Impl> impl, std::string address)
    : pid_(getpid()), impl_(std::move(impl)), address_(std::move(address)) {}

ControlPlane::~ControlPlane() {
  if (getpid() != pid_) {
    new (std::nothrow) std::shared_ptr<Impl>(std::move(impl_));  // the parent's sockets: let go of them untouched
    return;
  }
  if (impl_->loop().context().stopped()) {
    impl_->close();
    return;
  }
  auto done = std::make_shared<std::promise<void>>();
  auto closed = done->get_future();
  impl_->loop().post([impl = impl_, done] { impl->shutDown([done] { done->set_value(); }); });
  closed.wait_for(200ms);
}

Status ControlPlane::checkOwner() const {
  if (getpid() == pid_) return Status::ok();
  return Status::unavailable("the control plane belongs to process " + std::to_string(pid_) +
                             "; a forked child cannot use it");
}

Status ControlPlane::joinGroup(const std::string& group, int rank, const std::vector<ControlMember>& members,
                               const std::string& token, std::weak_ptr<ControlListener> listener) {
  FARANDOLE_RETURN_IF_ERROR(checkOwner());
  FARANDOLE_RETURN_IF_ERROR(checkGroupArguments(group, rank, members, token, address_));
  std::vector<ControlGroup::Member> decoded;
  for (std::size_t i = 0; i < members.size(); ++i) {
    Result<ControlAddress> address = ControlAddress::decode(members[i].address);
    if (!address) return address.status().wrap("members[" + std::to_string(i) + "].address");
    decoded.push_back({std::move(address).value(), members[i].host, members[i].pid, members[i].globalRank});
  }
  const std::string key = wireKey(group, token);
  {
    std::lock_guard lock(mutex_);
    if (!joined_.try_emplace(group, key).second) {
      return Status::invalidArgument("group '" + group + "' is joined already, expected leaveGroup() first");
    }
  }
  auto joining = impl_->makeGroup(key, rank, std::move(decoded), token, std::move(listener));
  impl_->loop().post([impl = impl_, joining] { impl->join(joining); });
  return Status::ok();
}

Result<std::string> ControlPlane::keyOf(const std::string& group) const {
  FARANDOLE_RETURN_IF_ERROR(checkOwner());
  std::lock_guard lock(mutex_);
  const auto found = joined_.find(group);
  if (found != joined_.end()) return found->second;
  return Status::invalidArgument("group is '" + group + "', expected one that this process has joined and not left");
}

Status ControlPlane::leaveGroup(const std::string& group) {
  const Result<std::string> key = keyOf(group);
  if (!key) return key.status();
  bool wasLast = false;
  {
    std::lock_guard lock(mutex_);
    joined_.erase(group);
    wasLast = joined_.empty();
  }
  leave(*key, wasLast);
  return Status::ok();
}

void ControlPlane::leave(const std::string& key, bool isGone) {
  impl_->loop().post([impl = impl_, key, isGone] {
    if (const auto found = impl->find(key)) found->leave(isGone);
  });
}

void ControlPlane::leaveAllGroups() {
  std::map<std::string, std::string> groups;
  {
    std::lock_guard lock(mutex_);
    groups = std::exchange(joined_, {});
  }
  for (const auto& [group, key] : groups) leave(key, true);
}

Status ControlPlane::abort(const std::string& group, const std::string& reason) {
  const Result<std::string> key = keyOf(group);
  if (!key) return key.status();
  impl_->loop().post([impl = impl_, key = *key, reason] {
    if (const auto found = impl->find(key)) found->abort(reason);
  });
  return Status::ok();
}

Status ControlPlane::reportDeath(const std::string& group, int rank, const std::string& reason) {
  const Result<std::string> key = keyOf(group);
  if (!key) return key.status();
  impl_->loop().post([impl = impl_, key = *key, rank, reason] {
    if (const auto found = impl->find(key)) found->reportDeath(rank, reason);
  });
  return Status::ok();
}

Status ControlPlane::askAllRanks(const std::string& group, std::chrono::milliseconds limit,
                                 GroupAnswersHandler handler) {
  const Result<std::string> key = keyOf(group);
  if (!key) return key.status();
  impl_->loop().post([impl = impl_, key = *key, limit, handler = std::move(handler)] {
    const auto found = impl->find(key);
    if (found == nullptr || found->isLeaving()) return handler({});
    found->query().ask(limit, handler);
  });
  return Status::ok();
}

}  // namespace farandole::net
