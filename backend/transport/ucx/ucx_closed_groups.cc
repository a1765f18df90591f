// What comes for groups that are over. UCX keeps it with all else that nobody has wanted yet, and tells of none of it.
#include <algorithm>
#include <utility>

#include "backend/p2p/message_tag.h"
#include "backend/transport/ucx/ucx_transport.h"

namespace farandole::transport {
namespace {

using Clock = std::chrono::steady_clock;

// Each look for a group's messages walks past all that UCX keeps of others. Most comes for those that were closed last.
constexpr std::size_t kLatestPerLook = 4;
constexpr std::size_t kGroupsPerLook = 8;
// How long the transport is held for further ones, and for what is dropped; the next look goes on.
constexpr auto kMostForLooks = std::chrono::milliseconds(1);
constexpr auto kMostAtOnce = std::chrono::milliseconds(10);

void dropped(void* handle, ucs_status_t, const ucp_tag_recv_info_t*, void*) { ucp_request_free(handle); }

}  // namespace

void UcxTransport::closeGroup(std::uint32_t group, const std::vector<std::string_view>& members) {
  std::vector<PeerId> peers;
  peers.reserve(members.size());
  for (const std::string_view address : members) {
    if (address.size() <= sizeof(Token)) {
      peers.push_back(kAnyPeer);
      continue;
    }
    const Peer* const known = findPeer(address);
    peers.push_back((known != nullptr ? *known : addPeer(address)).id);
  }
  closedGroups_.push_front({group, shared(std::move(peers))});
  ++nextClosed_;  // it has moved on
  if (!isProgressing_) dropLateMessages();
}

// Groups that are made over and over have the same members.
UcxTransport::Members UcxTransport::shared(std::vector<PeerId> members) const {
  const auto same =
      std::ranges::find_if(closedGroups_, [&](const ClosedGroup& one) { return *one.members == members; });
  if (same != closedGroups_.end()) return same->members;
  return std::make_shared<const std::vector<PeerId>>(std::move(members));
}

void UcxTransport::openGroup(std::uint32_t group) {
  const auto known = std::ranges::find(closedGroups_, group, &ClosedGroup::group);
  const ClosedGroup closed = known != closedGroups_.end() ? *known : ClosedGroup{group, shared({})};
  if (known != closedGroups_.end()) closedGroups_.erase(known);
  (void)dropMessages(closed, Clock::time_point::max());
}

void UcxTransport::dropLateMessages() {
  const Clock::time_point begun = Clock::now();
  const Clock::time_point until = begun + kMostAtOnce;
  if (!dropOldest(until)) return;
  const std::size_t latest = std::min(closedGroups_.size(), kLatestPerLook);
  for (std::size_t i = 0; i < latest; ++i) {
    if (!dropMessages(closedGroups_[i], until)) return;
  }
  for (std::size_t looked = latest; looked < closedGroups_.size(); ++looked) {
    if (looked >= kGroupsPerLook && Clock::now() - begun > kMostForLooks) return;
    if (nextClosed_ >= closedGroups_.size()) nextClosed_ = latest;
    if (!dropMessages(closedGroups_[nextClosed_], until)) return;
    ++nextClosed_;
  }
}

// Those that have been there longest are found without walking past others. False when that is all there was, or the
// time is over.
bool UcxTransport::dropOldest(Clock::time_point until) {
  while (Clock::now() < until) {
    ucp_tag_recv_info_t info;
    if (ucp_tag_probe_nb(worker_, 0, 0, 0, &info) == nullptr) return false;
    const auto closed = std::ranges::find(closedGroups_, p2p::groupOf(info.sender_tag), &ClosedGroup::group);
    if (closed == closedGroups_.end()) return true;
    dropMessage(ucp_tag_probe_nb(worker_, info.sender_tag, p2p::kExactMask, 1, &info), info, *closed);
  }
  return false;
}

bool UcxTransport::dropMessages(const ClosedGroup& closed, Clock::time_point until) {
  while (Clock::now() < until) {
    ucp_tag_recv_info_t info;
    const ucp_tag_message_h message = ucp_tag_probe_nb(worker_, p2p::groupTag(closed.group), p2p::kGroupMask, 1, &info);
    if (message == nullptr) return true;
    dropMessage(message, info, closed);
  }
  return false;
}

// Receives it into no room at all, which uses it up.
void UcxTransport::dropMessage(ucp_tag_message_h message, const ucp_tag_recv_info_t& info, const ClosedGroup& closed) {
  ucp_request_param_t param;
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv = &dropped;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  // What its sender is answered may be left pending: whoever sleeps is to arm UCX again.
  if (UCS_PTR_IS_PTR(ucp_tag_msg_recv_nbx(worker_, nullptr, 0, message, &param))) signal();
  const auto source = static_cast<std::size_t>(p2p::sourceOf(info.sender_tag));
  const std::vector<PeerId>& members = *closed.members;
  if (source < members.size() && members[source] != kAnyPeer) noteReceived(members[source], info.length);
}

}  // namespace farandole::transport
