#include "backend/c10d/meeting_round.h"

#include <algorithm>
#include <charconv>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "backend/common/settings.h"
#include "backend/common/text.h"
#include "backend/net/token_proof.h"

namespace farandole::backend {
namespace {

constexpr const char* kRound = "farandole/round";
constexpr const char* kGivenUp = "given up";
constexpr const char* kTwice = "twice";

std::vector<std::uint8_t> makeName() {
  const std::uint64_t number = net::randomNumber();
  const std::string text = hexText({reinterpret_cast<const char*>(&number), sizeof number});
  return {text.begin(), text.end()};
}

std::string guestKey(int rank) { return "guest/" + std::to_string(rank); }
std::string welcomeKey(int rank) { return "welcome/" + std::to_string(rank); }

// Who gave a round up as far as this process has heard: they are few.
struct KnownGivers {
  std::mutex mutex;
  std::set<std::string> numbers;
};

KnownGivers& knownGivers() {
  static auto* const givers = new KnownGivers;  // outlives static destructors
  return *givers;
}

// Whether that is news.
bool note(const std::string& giver) {
  KnownGivers& known = knownGivers();
  std::lock_guard lock(known.mutex);
  return known.numbers.insert(giver).second;
}

}  // namespace

MeetingRound::MeetingRound(StorePtr shared, int rank, int size)
    : shared_(std::move(shared)),
      waiting_(c10::make_intrusive<::c10d::PrefixStore>("farandole/waiting", shared_)),
      rank_(rank),
      number_(makeName()) {
  for (int other = 1; rank == 0 && other < size; ++other) awaited_.push_back(other);
}

void MeetingRound::open(const Blob& name) {
  name_.assign(name.begin(), name.end());
  store_ = c10::make_intrusive<::c10d::PrefixStore>("farandole/" + name_, shared_);
}

void MeetingRound::begin() {
  open(number_);
  shared_->set(kRound, number_);
}

bool MeetingRound::welcome() {
  const std::size_t numCome = std::erase_if(awaited_, [this](int other) {
    const bool hasCome = store_->check({guestKey(other)});
    if (hasCome) store_->set(welcomeKey(other), store_->get(guestKey(other)));
    return hasCome;
  });
  return numCome > 0;
}

bool MeetingRound::isWelcome() {
  isEntered_ = store_ != nullptr && store_->check({welcomeKey(rank_)}) && store_->get(welcomeKey(rank_)) == number_;
  return isEntered_;
}

bool MeetingRound::isAnothers(const std::string& key) const {
  return store_ != nullptr && store_->check({key}) && store_->get(key) != number_;
}

bool MeetingRound::isTwice() const { return isAnothers(guestKey(rank_)) || isAnothers(welcomeKey(rank_)); }

void MeetingRound::tellTwice() {
  if (std::exchange(toldTwice_, name_) == name_) return;
  const std::string rank = std::to_string(rank_);
  store_->set(kTwice, Blob(rank.begin(), rank.end()));
}

std::optional<int> MeetingRound::whoIsTwice() const {
  if (shared_->get(kRound) != number_) return 0;
  if (!store_->check({kTwice})) return std::nullopt;
  const Blob text = store_->get(kTwice);
  int rank = 0;
  std::from_chars(reinterpret_cast<const char*>(text.data()), reinterpret_cast<const char*>(text.data() + text.size()),
                  rank);
  return rank;
}

bool MeetingRound::enter() {
  if (rank_ == 0) return isEntered_ = true;
  if (isWelcome()) return true;
  if (!shared_->check({kRound})) return false;
  const Blob latest = shared_->get(kRound);
  if (std::ranges::equal(latest, name_)) return false;
  // Rank 0 may have answered in the one before, and begun another one since.
  if (isWelcome()) return true;
  open(latest);
  store_->set(guestKey(rank_), number_);
  return true;
}

void MeetingRound::giveUp(const std::string& reason) {
  Blob blob = number_;
  blob.insert(blob.end(), reason.begin(), reason.end());
  (void)note({number_.begin(), number_.end()});
  (void)note(name_);  // rank 0's number, who may give up at the same time: no news to the next meeting
  if (!isEntered_) {
    waiting_->set(kGivenUp, blob);
    if (rank_ != 0) (void)enter();  // rank 0 looks no more where others wait once it has begun
  }
  if (store_ != nullptr) store_->set(kGivenUp, blob);
}

std::optional<std::string> MeetingRound::readGivenUp(::c10d::Store& store) const {
  if (!store.check({kGivenUp})) return std::nullopt;
  const Blob blob = store.get(kGivenUp);
  const auto reason = blob.begin() + static_cast<std::ptrdiff_t>(std::min(blob.size(), number_.size()));
  const bool isNews = note({blob.begin(), reason});
  if (!isNews && !isEntered_) return std::nullopt;
  return std::string(reason, blob.end());
}

std::optional<std::string> MeetingRound::givenUp() {
  if (isEntered_) return readGivenUp(*store_);
  if (textSetting("TORCHELASTIC_USE_AGENT_STORE") == "True") return std::nullopt;
  auto reason = readGivenUp(*waiting_);
  return reason || store_ == nullptr ? reason : readGivenUp(*store_);
}

}  // namespace farandole::backend
