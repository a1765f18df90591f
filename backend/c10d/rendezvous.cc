#include "backend/c10d/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "backend/common/deadline.h"
#include "backend/common/rank_name.h"
#include "backend/net/token_proof.h"
#include "backend/net/wire.h"
#include "backend/transport/departure.h"

namespace farandole::backend {
namespace {

using collective::Member;

// Changes whenever ranks of different versions could not talk to each other.
constexpr std::uint32_t kWireVersion = 9;
// Between looks for ranks that are late: longer and longer, but for those that are about to come.
class Pauses {
 public:
  void take() {
    std::this_thread::sleep_for(next_);
    next_ = std::min(2 * next_, kLongest);
  }
  void restart() { next_ = kShortest; }
  // What goes as it should never comes so far, but on large groups.
  bool areLong() const { return next_ == kLongest; }

 private:
  static constexpr std::chrono::milliseconds kShortest{1};
  static constexpr std::chrono::milliseconds kLongest{100};
  std::chrono::milliseconds next_ = kShortest;
};

using Blob = std::vector<std::uint8_t>;  // as stores have them

Blob blobOf(std::string_view text) { return {text.begin(), text.end()}; }

std::string_view textOf(const Blob& blob) { return {reinterpret_cast<const char*>(blob.data()), blob.size()}; }

struct MemberEntry {
  Member member;
  int size = 0;  // of the group
  std::string cudaMessages;
};

Blob encode(const MemberEntry& entry) {
  const Member& member = entry.member;
  net::WireWriter writer;
  writer.number(kWireVersion).number(member.group).number(member.pid).number(entry.size);
  writer.text(member.host).text(member.hostIdentity).text(member.address).text(member.algorithms);
  writer.text(entry.cudaMessages);
  return blobOf(writer.take());
}

// What a rank of a group that spans hosts tells beside.
struct NetworkEntry {
  std::string address;
  std::string control;
  std::string token;  // rank 0's
};

Blob encode(const NetworkEntry& entry) {
  net::WireWriter writer;
  writer.text(entry.address).text(entry.control).text(entry.token);
  return blobOf(writer.take());
}

Status malformed(const std::string& rank) { return Status::internal(rank + " published a malformed address"); }

Result<NetworkEntry> decodeNetwork(const std::string& rank, const Blob& blob) {
  net::WireReader reader(textOf(blob));
  NetworkEntry entry;
  entry.address = reader.text();
  entry.control = reader.text();
  entry.token = reader.text();
  if (!reader.complete()) return malformed(rank);
  return entry;
}

std::string makeToken() {
  net::WireWriter writer;
  writer.number(net::randomNumber()).number(net::randomNumber());
  return writer.take();
}

Result<MemberEntry> decode(const std::string& rank, const Blob& blob) {
  net::WireReader reader(textOf(blob));
  const auto version = reader.number<std::uint32_t>();
  if (version != kWireVersion) {
    return Status::unavailable(rank + " runs a farandole of wire version " + std::to_string(version) +
                               ", this rank one of " + std::to_string(kWireVersion) +
                               ": install the same version everywhere");
  }
  MemberEntry entry;
  Member& member = entry.member;
  member.group = reader.number<std::uint32_t>();
  member.pid = reader.number<int>();
  entry.size = reader.number<int>();
  member.host = reader.text();
  member.hostIdentity = reader.text();
  member.address = reader.text();
  member.algorithms = reader.text();
  entry.cudaMessages = reader.text();
  if (!reader.complete()) return malformed(rank);
  return entry;
}

Status checkSameSize(const std::string& rank, int mine, const std::string& otherRank, int theirs) {
  if (mine == theirs) return Status::ok();
  return Status::invalidArgument("the group's size is " + std::to_string(mine) + " on " + rank + ", " +
                                 std::to_string(theirs) + " on " + otherRank + "; expected the same on all ranks");
}

Status checkSameCudaMessages(const std::string& rank, const std::string& mine, const std::string& otherRank,
                             const std::string& theirs) {
  if (mine == theirs) return Status::ok();
  return Status::invalidArgument("FARANDOLE_CUDA_MESSAGES is '" + mine + "' on " + rank + ", '" + theirs + "' on " +
                                 otherRank + "; expected the same on all ranks");
}

std::string hostName() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

// Groups that are made one out of another have one store, and prefixes.
const void* worldOf(::c10d::Store& store) {
  auto* const prefixed = dynamic_cast<::c10d::PrefixStore*>(&store);
  return prefixed != nullptr ? prefixed->getUnderlyingNonPrefixStore().get() : &store;
}

}  // namespace

MeetingPlace::MeetingPlace(const MeetingRound::StorePtr& store, int rank, int size, std::vector<int> globalRanks,
                           std::chrono::milliseconds timeout)
    : round_(store, rank, size),
      world_(worldOf(*store)),
      rank_(rank),
      size_(size),
      globalRanks_(std::move(globalRanks)),
      timeout_(timeout),
      deadline_(deadlineIn(timeout)) {}

std::string MeetingPlace::nameOf(int rank) const { return rankName(rank, globalRank(rank)); }

std::string MeetingPlace::keyOf(const std::string& board, int rank) const { return board + "/" + std::to_string(rank); }

void MeetingPlace::post(const std::string& board, const Blob& blob) { round_.store()->set(keyOf(board, rank_), blob); }

Status MeetingPlace::timedOut(int rank) const {
  return Status::timeout(nameOf(rank) + " of " + std::to_string(size_) + " did not join the group within " +
                         std::to_string(timeout_.count()) + " ms");
}

Status MeetingPlace::onceEach() {
  const std::optional<int> rank = round_.whoIsTwice();
  return rank ? Status::invalidArgument("two processes have come as " + nameOf(*rank) + " of " + std::to_string(size_) +
                                        "; expected one for each rank")
              : Status::ok();
}

Status MeetingPlace::enterRound() {
  FARANDOLE_RETURN_IF_ERROR(givenUp());
  if (rank_ == 0) {
    round_.begin();
    FARANDOLE_RETURN_IF_ERROR(givenUp());  // by those who have looked for it before it was there
  }
  for (Pauses pauses; !round_.isEntered(); pauses.take()) {
    if (round_.enter()) pauses.restart();
    if (round_.isEntered()) break;
    FARANDOLE_RETURN_IF_ERROR(givenUp());
    FARANDOLE_RETURN_IF_ERROR(health());
    if (pauses.areLong() && round_.isTwice()) round_.tellTwice();
    if (std::chrono::steady_clock::now() < deadline_) continue;
    const char* const who = "another process has come as this rank, too, or did so to an earlier meeting in this store";
    return round_.isTwice() ? timedOut(0).wrap(who) : timedOut(0);
  }
  return Status::ok();
}

Result<MeetingPlace::Blob> MeetingPlace::read(const std::string& board, int rank) {
  const std::string key = keyOf(board, rank);
  const auto isThere = [&] { return round_.store()->check({key}); };
  for (Pauses pauses; !isThere(); pauses.take()) {
    if (rank_ == 0 && round_.welcome()) pauses.restart();
    FARANDOLE_RETURN_IF_ERROR(givenUp());
    if (rank_ == 0 && pauses.areLong()) {
      if (Status twice = onceEach(); !twice) {
        // Who has heard of the end, or been met, may have come again since.
        FARANDOLE_RETURN_IF_ERROR(givenUp());
        if (!isThere()) return twice;
        break;
      }
    }
    if (Status gone = health(); !gone) {
      if (!isThere()) return gone;
      break;  // who has met all may leave before the others have seen it
    }
    if (std::chrono::steady_clock::now() >= deadline_) return timedOut(rank);
  }
  return round_.store()->get(key);
}

Status MeetingPlace::givenUp() {
  if (!givenUp_) return givenUp_;
  if (const auto why = round_.givenUp()) givenUp_ = Status::aborted(*why);
  return givenUp_;
}

Status MeetingPlace::giveUp(const Status& why) {
  // The first reason stays; who leaves has told why before that.
  try {
    if (const Status first = givenUp(); !first) return transport::isGone(why) ? first : why;
    round_.giveUp(nameOf(rank_) + " has given the group up: " + why.toString());
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store is gone, and `why` came first
  }
  return why;
}

Status MeetingPlace::health() {
  std::vector<std::pair<int, collective::Communicator::Gone>> gone;
  {
    transport::ProgressEngine::Access access(context_->connections().engine());
    for (const auto& [member, rank, peer] : neighbours_) {
      if (Status failure = access.transport().failure(peer); !failure) gone.push_back({rank, {member, failure}});
    }
  }
  for (auto& elsewhere : context_->goneFrom(world_)) {
    const auto found = std::find(globalRanks_.begin(), globalRanks_.end(), elsewhere.member.globalRank);
    if (found == globalRanks_.end()) continue;
    gone.emplace_back(static_cast<int>(found - globalRanks_.begin()), std::move(elsewhere));
  }
  if (gone.empty()) return Status::ok();
  // Who left may have done so because of a death.
  const auto isDeath = [](const auto& one) { return one.second.status.code() == StatusCode::kPeerFailed; };
  const auto first = std::find_if(gone.begin(), gone.end(), isDeath);
  const auto& [rank, who] = first != gone.end() ? *first : gone.front();
  return who.status.wrap(rankName(rank, globalRank(rank), who.member.host, who.member.pid) + " is gone");
}

void MeetingPlace::watch(int rank, const Member& member) {
  const bool isHere = !member.hostIdentity.empty() && member.hostIdentity == context_->hostIdentity();
  if (rank == rank_ || !isHere) return;
  transport::ProgressEngine::Access access(context_->connections().engine());
  // What keeps it from being connected is an error of what connects to stay.
  if (const Result<transport::PeerId> peer = context_->connections().connect(member.address)) {
    neighbours_.push_back({member, rank, *peer});
  }
}

Result<Meeting> MeetingPlace::meetMembers(ProcessContext& context, std::uint32_t group,
                                          const CommonSettings& settings) {
  context_ = &context;
  return orGiveUp(meetAll(group, settings));
}

Result<Meeting> MeetingPlace::meetAll(std::uint32_t group, const CommonSettings& settings) {
  FARANDOLE_RETURN_IF_ERROR(enterRound());
  Member self{"", group, hostName(), getpid(), context_->hostIdentity(), settings.algorithms, globalRank(rank_)};
  {
    transport::ProgressEngine::Access access(context_->connections().engine());
    self.address = access.transport().address();
  }
  post("member", encode({self, size_, settings.cudaMessages}));
  Meeting met;
  for (int other = 0; other < size_; ++other) {
    const auto blob = read("member", other);
    if (!blob) return blob.status();
    Result<MemberEntry> entry = decode(nameOf(other), *blob);
    if (!entry) return entry.status();
    FARANDOLE_RETURN_IF_ERROR(checkSameSize(nameOf(rank_), size_, nameOf(other), entry->size));
    entry->member.globalRank = globalRank(other);
    FARANDOLE_RETURN_IF_ERROR(collective::checkSameAlgorithms(rank_, self, other, entry->member));
    FARANDOLE_RETURN_IF_ERROR(
        checkSameCudaMessages(nameOf(rank_), settings.cudaMessages, nameOf(other), entry->cudaMessages));
    watch(other, entry->member);
    met.members.push_back(std::move(entry->member));
  }
  // All have come, and some may have gone on and left.
  FARANDOLE_RETURN_IF_ERROR(givenUp());

  // All ranks see in the same way whether any two of them are on different hosts.
  const auto isElsewhere = [&](const Member& member) {
    return member.hostIdentity.empty() || member.hostIdentity != self.hostIdentity;
  };
  if (std::none_of(met.members.begin(), met.members.end(), isElsewhere)) return met;
  const Result<std::string> address = context_->networkAddress();
  if (!address) return address.status();
  const Result<std::string> control = context_->controlAddress();
  if (!control) return control.status();
  post("network", encode(NetworkEntry{*address, *control, rank_ == 0 ? makeToken() : ""}));
  for (int other = 0; other < size_; ++other) {
    const auto blob = read("network", other);
    if (!blob) return blob.status();
    const Result<NetworkEntry> entry = decodeNetwork(nameOf(other), *blob);
    if (!entry) return entry.status();
    Member& member = met.members[other];
    if (isElsewhere(member)) member.address = entry->address;
    if (other == 0) met.token = entry->token;
    met.controls.push_back({entry->control, member.host, member.pid, member.globalRank});
  }
  return met;
}

Result<std::vector<std::string>> MeetingPlace::exchange(const std::string& name, const std::string& mine) {
  post(name, blobOf(mine));
  std::vector<std::string> all;
  for (int other = 0; other < size_; ++other) {
    const auto blob = read(name, other);
    if (!blob) return giveUp(blob.status());
    all.emplace_back(textOf(*blob));
  }
  return all;
}

}  // namespace farandole::backend
