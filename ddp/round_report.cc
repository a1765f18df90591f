#include "ddp/round_report.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "ddp/abandonment.h"
#include "ddp/round_trouble.h"

namespace farandole::ddp {
namespace {

constexpr std::size_t kTrouble = 0;
constexpr std::size_t kDeparts = 1;
constexpr std::size_t kMost = 2;
constexpr std::size_t kFewest = 3;
constexpr std::size_t kFlags = 4;

constexpr int kNone = std::numeric_limits<int>::min();  // less than any number or its negative

// How many numbers the replicas of experts share.
std::size_t countOfExperts(const std::vector<char>& isOfExperts, bool ordersExperts) {
  const bool haveFlags = std::find(isOfExperts.begin(), isOfExperts.end(), 1) != isOfExperts.end();
  return haveFlags || ordersExperts ? kFlags + isOfExperts.size() : 0;
}

}  // namespace

bool RoundReport::canTell(const Replicas& replicas) {
  return hasCpuBackend(*replicas.group) && (!replicas.instances || hasCpuBackend(*replicas.instances));
}

RoundReport::Largest::Largest(Replicas ranks, std::size_t count)
    : replicas(std::move(ranks)),
      isShared(replicas.size() > 1 && canTell(replicas)),
      values(at::zeros({static_cast<int64_t>(count)}, at::kInt)) {}

void RoundReport::Largest::start() {
  work = isShared && values.numel() > 0 ? allReduce(*replicas.group, values, c10d::ReduceOp::MAX) : nullptr;
}

void RoundReport::Largest::finish() {
  const WorkPtr ours = std::exchange(work, nullptr);
  if (!ours) return;
  await(*replicas.group, c10::kCPU, *ours);
  if (!replicas.instances) return;
  await(*replicas.instances, c10::kCPU, *allReduce(*replicas.instances, values, c10d::ReduceOp::MAX));
}

RoundReport::RoundReport(const DataParallelGroups& groups, const std::vector<char>& isOfExperts, bool ordersExperts)
    : isOfExperts_(isOfExperts),
      ofAll_(groups.dense, kFlags + isOfExperts.size()),
      ofExperts_(groups.experts, countOfExperts(isOfExperts, ordersExperts)) {}

void RoundReport::start(std::string trouble, std::optional<int> untrained, const std::array<bool, 2>& departs,
                        const std::vector<char>& flags) {
  trouble_ = std::move(trouble);
  untrained_ = untrained;
  ofAll_.data()[kTrouble] = trouble_.empty() ? 0 : 1;
  ofAll_.data()[kMost] = untrained ? *untrained : kNone;
  ofAll_.data()[kFewest] = untrained ? -*untrained : kNone;
  ofAll_.data()[kDeparts] = departs[0] ? 1 : 0;
  if (ofExperts_.values.numel() > 0) ofExperts_.data()[kDeparts] = departs[1] ? 1 : 0;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    (isOfExperts_[i] != 0 ? ofExperts_ : ofAll_).data()[kFlags + i] = flags[i];
  }
  ofAll_.start();
  ofExperts_.start();
}

std::string RoundReport::finish() {
  ofAll_.finish();
  ofExperts_.finish();
  if (ofAll_.told(kTrouble) == 0) return areUnlike() ? describeUnlike() : "";
  if (!ofAll_.isShared) return trouble_;
  std::string all;
  for (const std::string& text : gatherTexts(*ofAll_.replicas.group, trouble_, c10::kCPU)) {
    if (!text.empty()) all += (all.empty() ? "" : "\n") + text;
  }
  return all.empty() ? "a rank of another optimizer instance has failed" : all;
}

bool RoundReport::areUnlike() const {
  return ofAll_.told(kMost) != kNone && ofAll_.told(kMost) != -ofAll_.told(kFewest);
}

std::string RoundReport::describeUnlike() const {
  std::vector<std::optional<int>> byRank;
  const std::string mine = untrained_ ? std::to_string(*untrained_) : "";
  for (const std::string& text : gatherTexts(*ofAll_.replicas.group, mine, c10::kCPU)) {
    byRank.push_back(text.empty() ? std::nullopt : std::optional(std::stoi(text)));
  }
  return describeUntrained(byRank, ofAll_.told(kMost), -ofAll_.told(kFewest));
}

bool RoundReport::flag(std::size_t index) const {
  return (isOfExperts_[index] != 0 ? ofExperts_ : ofAll_).told(kFlags + index) != 0;
}

bool RoundReport::departs(std::size_t queue) const { return (queue == 0 ? ofAll_ : ofExperts_).told(kDeparts) != 0; }

std::vector<int> RoundReport::largest(const Replicas& replicas, const std::vector<int>& mine) {
  Largest of(replicas, mine.size());
  std::copy(mine.begin(), mine.end(), of.data());
  of.start();
  of.finish();
  return {of.data(), of.data() + mine.size()};
}

}  // namespace farandole::ddp
