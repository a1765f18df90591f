#include "ddp/bucket_issuer.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <utility>

namespace farandole::ddp {

BucketIssuer::BucketIssuer(const DataParallelGroups& groups, const ModelBuffers& buffers, const ReducerOptions& options)
    : groups_(groups) {
  // What goes over one group must have one order, in both steps.
  const bool hasOneQueue = groups.experts.group == groups.dense.group ||
                           (groups.experts.instances && groups.experts.instances == groups.dense.instances) ||
                           !buffers.device().is_cpu();
  const double scale = options.isAveraged ? 1.0 / groups_.dense.size() : 1.0;
  for (const Replicas* replicas : {&groups_.dense, &groups_.experts}) {
    reductions_.push_back(
        std::make_shared<Reduction>(*replicas, buffers.device().type(),
                                    Reduction::Options{.scale = scale,
                                                       .sharded = buffers.isSharded(),
                                                       .averageInCollective = options.averageInCollective,
                                                       .accumulatesInFloat = options.accumulatesInFloat}));
  }
  std::vector<std::vector<int>> groupsOf(reductions_.size());
  bool isMixed = false;
  bucketGroupOf_.resize(buffers.parameters().size());
  for (const BucketGroupLayout& layout : buffers.bucketGroups()) {
    const size_t queue = layout.isExpert && !hasOneQueue ? 1 : 0;
    const size_t kind = layout.isExpert ? 1 : 0;
    const int index = static_cast<int>(bucketGroups_.size());
    std::vector<Bucket> buckets;
    size_t waitsFor = 0;
    for (int bucket : layout.buckets) {
      buckets.emplace_back(buffers.gradsOf(bucket), reductions_[kind]);
      for (int parameter : buffers.layout().buckets[bucket].parameters) bucketGroupOf_[parameter] = index;
      waitsFor += buffers.layout().buckets[bucket].parameters.size();
    }
    bucketGroups_.emplace_back(std::move(buckets), waitsFor, queue);
    isMixed = isMixed || (layout.isExpert && hasOneQueue && groups.experts.group != groups.dense.group);
    bucketsOf_.push_back(layout.buckets);
    groupsOf[queue].push_back(index);
  }
  for (std::size_t q = 0; q < groupsOf.size(); ++q) {
    learning_.emplace_back(groupsOf[q].size());
    // Not that of buckets of several groups, whose ranks nothing makes agree.
    learns_[q] = options.overlaps && groupsOf[q].size() > 1 && !isMixed && RoundReport::canTell(replicasOf(q));
    queues_.emplace_back(std::move(groupsOf[q]));
  }
  issued_.reserve(bucketGroups_.size());
  events_.resize(buffers.layout().buckets.size());
}

void BucketIssuer::setHook(const std::shared_ptr<CommHook>& hook) {
  for (std::size_t g = 0; g < bucketGroups_.size(); ++g) bucketGroups_[g].setHook(hook, bucketsOf_[g]);
  for (IssueQueue& queue : queues_) queue.orderBy(std::vector<int>(queue.size(), 0));
  learns_ = {};
}

bool BucketIssuer::reducesInPlaces() const {
  return std::all_of(reductions_.begin(), reductions_.end(), [](const auto& of) { return of->reducesInPlaces(); });
}

std::vector<char> BucketIssuer::areAveraged() const {
  std::vector<char> areAveraged;
  areAveraged.reserve(bucketGroupOf_.size());
  for (const int group : bucketGroupOf_) areAveraged.push_back(bucketGroups_[group].isAveraged() ? 1 : 0);
  return areAveraged;
}

void BucketIssuer::setScale(double scale) {
  for (const auto& reduction : reductions_) reduction->setScale(scale);
}

void BucketIssuer::markReady(int parameter) {
  const int group = bucketGroupOf_[parameter];
  if (bucketGroups_[group].markReady()) queues_[bucketGroups_[group].queue()].markReady(group);
}

void BucketIssuer::issue(const PartsOf& partsOf) {
  for (IssueQueue& queue : queues_) {
    while (const std::optional<int> group = queue.takeNext()) {
      if (timeline_) {
        for (int bucket : bucketsOf_[*group]) events_[bucket] = timeline_->begin(Timeline::Kind::kReduction, bucket);
      }
      bucketGroups_[*group].issue([&](std::size_t i) { return partsOf(bucketsOf_[*group][i]); });
      issued_.push_back(*group);
      advance(false);  // one order is one of all steps
    }
  }
  advance(false);
  // Memory that is free again is what autograd takes for the next gradients.
  while (released_ < issued_.size() && bucketGroups_[issued_[released_]].releaseParts()) ++released_;
}

void BucketIssuer::advance(bool wait) {
  while (advanced_ < issued_.size() && bucketGroups_[issued_[advanced_]].advance(wait)) {
    if (timeline_) recordEnds(issued_[advanced_]);
    ++advanced_;
  }
}

void BucketIssuer::recordEnds(int bucketGroup) {
  const std::vector<Bucket>& buckets = bucketGroups_[bucketGroup].buckets();
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].hasHook()) continue;  // whose future tells nothing of how far it is
    timeline_->endWith(events_[bucketsOf_[bucketGroup][b]], buckets[b].work(), buckets[b].device());
  }
}

void BucketIssuer::await() {
  std::exception_ptr first;
  const auto attempt = [&first](const auto& step) {
    try {
      step();
    } catch (const std::exception&) {
      if (first == nullptr) first = std::current_exception();
    }
  };
  attempt([this] { advance(true); });
  for (BucketGroup& group : bucketGroups_) attempt([&group] { group.wait(); });
  if (timeline_) {
    for (int group : issued_) {
      for (int bucket : bucketsOf_[group]) timeline_->see(events_[bucket]);
    }
  }
  if (first) std::rethrow_exception(first);
}

void BucketIssuer::endArrivals() {
  for (IssueQueue& queue : queues_) queue.endArrivals();
}

std::array<bool, 2> BucketIssuer::departures(bool showsOrder) {
  std::array<bool, 2> departs{};
  for (std::size_t q = 0; q < queues_.size(); ++q) {
    if (!learns_[q]) continue;
    if (showsOrder) learning_[q].note(queues_[q].places());
    departs[q] = learning_[q].departs();
  }
  return departs;
}

void BucketIssuer::agreeOnOrder(const RoundReport& report) {
  for (std::size_t q = 0; q < queues_.size(); ++q) {
    if (!learns_[q]) continue;
    if (report.departs(q)) {
      const std::vector<int> largest = RoundReport::largest(replicasOf(q), learning_[q].tell());
      learning_[q].learn(largest);
      queues_[q].orderBy(largest);
    }
    learning_[q].endRound();
  }
}

void BucketIssuer::reset() {
  for (BucketGroup& group : bucketGroups_) group.reset();
  for (IssueQueue& queue : queues_) queue.reset();
  issued_.clear();
  advanced_ = released_ = 0;
}

}  // namespace farandole::ddp
