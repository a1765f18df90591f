#include "ddp/bucket_layout.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <sstream>
#include <tuple>
#include <utility>

namespace farandole::ddp {
namespace {

constexpr int64_t kParameterMultiple = 64;  // elements: 128 bytes of a 16-bit type
constexpr int64_t kShardMultiple = 128;     // elements: 256 bytes of a 16-bit type
constexpr int64_t kBusMultiple = 1 << 16;   // elements
// Far above any model, low enough that no sum of the layout overflows.
constexpr int64_t kMaxElements = std::numeric_limits<int64_t>::max() / 8;

int64_t roundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

Status checkAtLeast(const char* name, int64_t value, int64_t least) {
  if (value >= least) return Status::ok();
  return Status::invalidArgument(std::string(name) + "=" + std::to_string(value) + ": expected at least " +
                                 std::to_string(least));
}

Status check(std::span<const ParameterSpec> parameters, const LayoutOptions& options) {
  if (options.bucketSize) FARANDOLE_RETURN_IF_ERROR(checkAtLeast("bucketSize", *options.bucketSize, 1));
  FARANDOLE_RETURN_IF_ERROR(checkAtLeast("worldSize", options.worldSize, 1));
  FARANDOLE_RETURN_IF_ERROR(checkAtLeast("expertWorldSize", options.expertWorldSize, 1));
  int64_t total = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int64_t numel = parameters[i].numel;
    if (numel < 0 || numel > kMaxElements - total) {
      return Status::invalidArgument("parameters[" + std::to_string(i) + "].numel=" + std::to_string(numel) +
                                     ": expected 0 or more, and at most " + std::to_string(kMaxElements) +
                                     " in all parameters");
    }
    total += numel;
  }
  return Status::ok();
}

// Fills one Layout; each buffer has at most one open bucket, its last.
class Builder {
 public:
  Builder(size_t parameters, const LayoutOptions& options) : options_(options) { layout_.slots.resize(parameters); }

  void add(int parameter, const ParameterSpec& spec) {
    const int buffer = bufferOf(spec);
    const bool isAlone = options_.sharded && spec.hasOwnBucket;
    if (isAlone) close(buffer);
    const int bucket = openBucket(buffer);
    BucketLayout& range = layout_.buckets[bucket];
    const int64_t offset = roundUp(range.end, options_.sharded ? kParameterMultiple : 1);
    range.end = offset + spec.numel;
    range.parameters.push_back(parameter);
    layout_.slots[parameter] = {buffer, bucket, offset, spec.numel};
    if (isAlone || (options_.bucketSize && range.end - range.begin >= *options_.bucketSize)) close(buffer);
  }

  Layout finish() {
    for (size_t buffer = 0; buffer < layout_.buffers.size(); ++buffer) close(static_cast<int>(buffer));
    sortBuckets();
    return std::move(layout_);
  }

 private:
  static constexpr int kNone = -1;

  int bufferOf(const ParameterSpec& spec) {
    const auto [found, isNew] =
        buffers_.try_emplace({spec.paramType, spec.gradType, spec.isExpert}, static_cast<int>(layout_.buffers.size()));
    if (isNew) {
      layout_.buffers.push_back({spec.paramType, spec.gradType, spec.isExpert, 0});
      open_.push_back(kNone);
    }
    return found->second;
  }

  int openBucket(int buffer) {
    if (open_[buffer] == kNone) {
      open_[buffer] = static_cast<int>(layout_.buckets.size());
      const int64_t begin = layout_.buffers[buffer].numel;
      layout_.buckets.push_back({buffer, begin, begin, {}});
    }
    return open_[buffer];
  }

  // Of the end of a bucket. Every bucket of a buffer ends at one, so that each spans one, too.
  int64_t multipleOf(const BufferLayout& buffer) const {
    if (!options_.sharded) return 1;
    const int64_t ranks = buffer.isExpert ? options_.expertWorldSize : options_.worldSize;
    const int64_t multiple = std::lcm(ranks, kShardMultiple);
    return options_.padForBusBandwidth ? std::lcm(multiple, kBusMultiple) : multiple;
  }

  void close(int buffer) {
    if (open_[buffer] == kNone) return;
    BucketLayout& range = layout_.buckets[open_[buffer]];
    range.end = roundUp(range.end, multipleOf(layout_.buffers[buffer]));
    layout_.buffers[buffer].numel = range.end;
    open_[buffer] = kNone;
  }

  void sortBuckets() {
    // Within a bucket the last listed parameter has the smallest registration index and is ready last.
    std::sort(layout_.buckets.begin(), layout_.buckets.end(), [](const BucketLayout& left, const BucketLayout& right) {
      return left.parameters.back() > right.parameters.back();
    });
    for (size_t bucket = 0; bucket < layout_.buckets.size(); ++bucket) {
      for (int parameter : layout_.buckets[bucket].parameters) {
        layout_.slots[parameter].bucket = static_cast<int>(bucket);
      }
    }
  }

  const LayoutOptions options_;
  Layout layout_;
  std::map<std::tuple<int, int, bool>, int> buffers_;  // (parameter type, gradient type, is expert) -> index
  std::vector<int> open_;                              // by buffer: its open bucket, or kNone
};

}  // namespace

Result<Layout> layoutBuckets(std::span<const ParameterSpec> parameters, const LayoutOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(check(parameters, options));
  Builder builder(parameters.size(), options);
  for (size_t i = parameters.size(); i-- > 0;) builder.add(static_cast<int>(i), parameters[i]);
  return builder.finish();
}

std::string toString(const Layout& layout) {
  std::ostringstream text;
  for (size_t i = 0; i < layout.buckets.size(); ++i) {
    const BucketLayout& bucket = layout.buckets[i];
    text << "bucket " << i << ": buffer " << bucket.buffer << " [" << bucket.begin << ", " << bucket.end
         << ") parameters";
    for (int parameter : bucket.parameters) text << " " << parameter;
    text << "\n";
  }
  return text.str();
}

}  // namespace farandole::ddp
