#include "backend/c10d/rendezvous.h"

#include <cstring>

namespace farandole::backend {
namespace {

using collective::Member;

// Changes whenever ranks of different versions could not talk to each other.
constexpr std::uint32_t kWireVersion = 1;

template <typename T>
void putNumber(std::string& blob, T number) {
  blob.append(reinterpret_cast<const char*>(&number), sizeof number);
}

void putText(std::string& blob, const std::string& text) {
  putNumber(blob, static_cast<std::uint32_t>(text.size()));
  blob += text;
}

std::vector<std::uint8_t> encode(const Member& member) {
  std::string blob;
  putNumber(blob, kWireVersion);
  putNumber(blob, member.group);
  putNumber(blob, member.pid);
  putText(blob, member.host);
  putText(blob, member.address);
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

Result<Member> decode(int rank, const std::vector<std::uint8_t>& blob) {
  Reader reader(blob);
  const auto version = reader.number<std::uint32_t>();
  if (version != kWireVersion) {
    return Status::unavailable("rank " + std::to_string(rank) + " runs a farandole of wire version " +
                               std::to_string(version) + ", this rank one of " + std::to_string(kWireVersion) +
                               ": install the same version everywhere");
  }
  Member member;
  member.group = reader.number<std::uint32_t>();
  member.pid = reader.number<int>();
  member.host = reader.text();
  member.address = reader.text();
  if (!reader.ok()) return Status::internal("rank " + std::to_string(rank) + " published a malformed address");
  return member;
}

std::string keyOf(int rank) { return "farandole/member/" + std::to_string(rank); }

}  // namespace

Result<std::vector<Member>> exchangeMembers(::c10d::Store& store, int rank, int size, const Member& self,
                                            std::chrono::milliseconds timeout) {
  store.set(keyOf(rank), encode(self));
  std::vector<Member> members;
  for (int other = 0; other < size; ++other) {
    const std::string key = keyOf(other);
    try {
      store.wait({key}, timeout);
    } catch (const std::exception& error) {
      return Status::timeout("rank " + std::to_string(other) + " of " + std::to_string(size) +
                             " did not join the group within " + std::to_string(timeout.count()) +
                             " ms: " + error.what());
    }
    Result<Member> member = decode(other, store.get(key));
    if (!member) return member.status();
    members.push_back(std::move(member).value());
  }
  return members;
}

}  // namespace farandole::backend
