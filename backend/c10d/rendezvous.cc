#include "backend/c10d/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "backend/net/token_proof.h"

namespace farandole::backend {
namespace {

using collective::Member;

// Changes whenever ranks of different versions could not talk to each other.
constexpr std::uint32_t kWireVersion = 6;

template <typename T>
void putNumber(std::string& blob, T number) {
  blob.append(reinterpret_cast<const char*>(&number), sizeof number);
}

void putText(std::string& blob, const std::string& text) {
  putNumber(blob, static_cast<std::uint32_t>(text.size()));
  blob += text;
}

std::vector<std::uint8_t> encode(const Member& member, const std::string& cudaMessages) {
  std::string blob;
  putNumber(blob, kWireVersion);
  putNumber(blob, member.group);
  putNumber(blob, member.pid);
  putText(blob, member.host);
  putText(blob, member.hostIdentity);
  putText(blob, member.address);
  putText(blob, member.algorithms);
  putText(blob, cudaMessages);
  return {blob.begin(), blob.end()};
}

// Reads from the front of a blob; once something was missing, all that follows is.
class Reader {
 public:
  explicit Reader(const std::vector<std::uint8_t>& blob) : blob_(blob) {}

  template <typename T>
  T number() {
    T value{};
    read(&value, sizeof value);
    return value;
  }
  std::string text() {
    const auto bytes = number<std::uint32_t>();
    std::string value(ok_ && bytes <= blob_.size() - at_ ? bytes : 0, '\0');
    ok_ = ok_ && value.size() == bytes;
    read(value.data(), value.size());
    return value;
  }
  bool ok() const { return ok_ && at_ == blob_.size(); }

 private:
  void read(void* data, std::size_t bytes) {
    ok_ = ok_ && bytes <= blob_.size() - at_;
    if (!ok_ || bytes == 0) return;
    std::memcpy(data, blob_.data() + at_, bytes);
    at_ += bytes;
  }

  const std::vector<std::uint8_t>& blob_;
  std::size_t at_ = 0;
  bool ok_ = true;
};

// What a rank of a group that spans hosts tells beside.
struct NetworkEntry {
  std::string address;
  std::string control;
  std::string token;  // rank 0's
};

std::vector<std::uint8_t> encode(const NetworkEntry& entry) {
  std::string blob;
  putText(blob, entry.address);
  putText(blob, entry.control);
  putText(blob, entry.token);
  return {blob.begin(), blob.end()};
}

Status malformed(int rank) {
  return Status::internal("rank " + std::to_string(rank) + " published a malformed address");
}

Result<NetworkEntry> decodeNetwork(int rank, const std::vector<std::uint8_t>& blob) {
  Reader reader(blob);
  NetworkEntry entry{reader.text(), reader.text(), reader.text()};
  if (!reader.ok()) return malformed(rank);
  return entry;
}

std::string makeToken() {
  std::string token;
  for (int i = 0; i < 2; ++i) putNumber(token, net::randomNumber());
  return token;
}

struct MemberEntry {
  Member member;
  std::string cudaMessages;
};

Result<MemberEntry> decode(int rank, const std::vector<std::uint8_t>& blob) {
  Reader reader(blob);
  const auto version = reader.number<std::uint32_t>();
  if (version != kWireVersion) {
    return Status::unavailable("rank " + std::to_string(rank) + " runs a farandole of wire version " +
                               std::to_string(version) + ", this rank one of " + std::to_string(kWireVersion) +
                               ": install the same version everywhere");
  }
  MemberEntry entry;
  Member& member = entry.member;
  member.group = reader.number<std::uint32_t>();
  member.pid = reader.number<int>();
  member.host = reader.text();
  member.hostIdentity = reader.text();
  member.address = reader.text();
  member.algorithms = reader.text();
  entry.cudaMessages = reader.text();
  if (!reader.ok()) return malformed(rank);
  return entry;
}

Status checkSameCudaMessages(int rank, const std::string& mine, int otherRank, const std::string& theirs) {
  if (mine == theirs) return Status::ok();
  return Status::invalidArgument("FARANDOLE_CUDA_MESSAGES is '" + mine + "' on rank " + std::to_string(rank) + ", '" +
                                 theirs + "' on rank " + std::to_string(otherRank) +
                                 "; expected the same on all ranks");
}

std::string hostName() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

// One store key per rank.
class Board {
 public:
  Board(::c10d::Store& store, std::string name, int size, std::chrono::milliseconds timeout)
      : store_(store), name_("farandole/" + std::move(name) + "/"), size_(size), timeout_(timeout) {}

  void post(int rank, const std::vector<std::uint8_t>& blob) { store_.set(name_ + std::to_string(rank), blob); }
  Result<std::vector<std::uint8_t>> read(int rank) {
    const std::string key = name_ + std::to_string(rank);
    try {
      store_.wait({key}, timeout_);
    } catch (const std::exception& error) {
      return Status::timeout("rank " + std::to_string(rank) + " of " + std::to_string(size_) +
                             " did not join the group within " + std::to_string(timeout_.count()) +
                             " ms: " + error.what());
    }
    return store_.get(key);
  }

 private:
  ::c10d::Store& store_;
  const std::string name_;
  const int size_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace

Result<Meeting> meetMembers(::c10d::Store& store, ProcessContext& context, int rank, int size, std::uint32_t group,
                            const CommonSettings& settings, std::chrono::milliseconds timeout) {
  Member self{"", group, hostName(), getpid(), context.hostIdentity(), settings.algorithms};
  {
    transport::ProgressEngine::Access access(context.connections().engine());
    self.address = access.transport().address();
  }
  Board board(store, "member", size, timeout);
  board.post(rank, encode(self, settings.cudaMessages));
  Meeting met;
  for (int other = 0; other < size; ++other) {
    const auto blob = board.read(other);
    if (!blob) return blob.status();
    Result<MemberEntry> entry = decode(other, *blob);
    if (!entry) return entry.status();
    FARANDOLE_RETURN_IF_ERROR(collective::checkSameAlgorithms(rank, self, other, entry->member));
    FARANDOLE_RETURN_IF_ERROR(checkSameCudaMessages(rank, settings.cudaMessages, other, entry->cudaMessages));
    met.members.push_back(std::move(entry->member));
  }

  // All ranks see in the same way whether any two of them are on different hosts.
  const auto isElsewhere = [&](const Member& member) {
    return member.hostIdentity.empty() || member.hostIdentity != self.hostIdentity;
  };
  if (std::none_of(met.members.begin(), met.members.end(), isElsewhere)) return met;
  const Result<std::string> address = context.networkAddress();
  if (!address) return address.status();
  const Result<std::string> control = context.controlAddress();
  if (!control) return control.status();
  Board network(store, "network", size, timeout);
  network.post(rank, encode(NetworkEntry{*address, *control, rank == 0 ? makeToken() : ""}));
  for (int other = 0; other < size; ++other) {
    const auto blob = network.read(other);
    if (!blob) return blob.status();
    const Result<NetworkEntry> entry = decodeNetwork(other, *blob);
    if (!entry) return entry.status();
    Member& member = met.members[other];
    if (isElsewhere(member)) member.address = entry->address;
    if (other == 0) met.token = entry->token;
    met.controls.push_back({entry->control, member.host, member.pid});
  }
  return met;
}

Result<std::vector<std::string>> exchange(::c10d::Store& store, const std::string& name, int rank, int size,
                                          const std::string& mine, std::chrono::milliseconds timeout) {
  Board board(store, name, size, timeout);
  board.post(rank, {mine.begin(), mine.end()});
  std::vector<std::string> all;
  for (int other = 0; other < size; ++other) {
    const auto blob = board.read(other);
    if (!blob) return blob.status();
    all.emplace_back(blob->begin(), blob->end());
  }
  return all;
}

}  // namespace farandole::backend
