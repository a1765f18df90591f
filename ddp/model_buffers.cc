#include "ddp/model_buffers.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace farandole::ddp {
namespace {

constexpr int64_t kDefaultBucketSize = 40'000'000;
constexpr int64_t kDefaultBucketSizePerRank = 1'000'000;
constexpr at::ScalarType kQuantizedStorage = at::kByte;

// Float8 parameters are gathered as bytes, which every backend can move.
at::ScalarType storageTypeOf(const at::Tensor& parameter) {
  return at::isFloat8Type(parameter.scalar_type()) ? kQuantizedStorage : parameter.scalar_type();
}

// The same tensor has its elements there from now on.
void place(const at::Tensor& view, const at::Tensor& memory) {
  view.unsafeGetTensorImpl()->set_storage_keep_dtype(memory.storage());
  view.unsafeGetTensorImpl()->set_storage_offset(memory.storage_offset());
}

ParameterSpec specOf(const ModelParameter& parameter, const BufferOptions& options) {
  const at::ScalarType type = parameter.tensor.scalar_type();
  return {.numel = parameter.tensor.numel(),
          .paramType = static_cast<int>(storageTypeOf(parameter.tensor)),
          .gradType = static_cast<int>(options.gradType.value_or(type)),
          .isExpert = parameter.isExpert,
          .hasOwnBucket = parameter.isSharedEmbedding};
}

// Why it cannot be reduced; empty when it can.
std::string refusalOf(const ModelParameter& parameter, c10::Device device, const std::string& first,
                      const BufferOptions& options) {
  const auto& tensor = parameter.tensor;
  const std::string name = "parameter '" + parameter.name + "' ";
  if (tensor.device() != device) {
    return name + "is on " + tensor.device().str() + ", '" + first + "' on " + device.str() +
           ": expected all on one device";
  }
  if (tensor.is_meta()) return name + "is on meta: expected a device with memory";
  if (tensor.layout() != at::kStrided) return name + "is sparse: expected a dense one";
  if (!tensor.is_leaf()) return name + "is computed from others: expected a leaf";
  if (at::isFloat8Type(tensor.scalar_type()) && !options.gradType) {
    return name + "is a float8: expected gradients of another type (grad_reduce_in_fp32=True)";
  }
  if (tensor.is_complex() && (options.gradType || options.sharded)) {
    return name + "is complex: expected neither grad_reduce_in_fp32 nor use_distributed_optimizer";
  }
  return "";
}

}  // namespace

std::vector<ParameterSpec> specsOf(const ModelBuffers& buffers) {
  std::vector<ParameterSpec> specs;
  for (size_t p = 0; p < buffers.parameters().size(); ++p) {
    const Slot& slot = buffers.layout().slots[p];
    const BufferLayout& buffer = buffers.layout().buffers[slot.buffer];
    specs.push_back({.numel = slot.numel,
                     .paramType = buffer.paramType,
                     .gradType = buffer.gradType,
                     .isExpert = buffer.isExpert,
                     .hasOwnBucket = buffers.parameters()[p].isSharedEmbedding});
  }
  return specs;
}

std::vector<ModelParameter> trainableOf(const Model& model) {
  std::vector<ModelParameter> trainable;
  for (const ModelParameter& parameter : model.parameters) {
    if (parameter.tensor.requires_grad()) trainable.push_back(parameter);
  }
  return trainable;
}

std::string refusalOf(const Model& model, const BufferOptions& options) {
  const std::vector<ModelParameter> trainable = trainableOf(model);
  if (options.bucketSize && *options.bucketSize < 1) {
    return "bucket_size=" + std::to_string(*options.bucketSize) + ": expected at least 1 element";
  }
  for (const ModelParameter& parameter : trainable) {
    std::string refusal = refusalOf(parameter, trainable[0].tensor.device(), trainable[0].name, options);
    if (!refusal.empty()) return refusal;
  }
  return "";
}

int64_t bucketSizeOf(const BufferOptions& options, const DataParallelGroups& groups) {
  return options.bucketSize.value_or(
      std::max(kDefaultBucketSize, kDefaultBucketSizePerRank * groups.dense.group->getSize()));
}

ModelBuffers::ModelBuffers(const Model& model, const DataParallelGroups& groups, const BufferOptions& options)
    : parameters_(trainableOf(model)), sharded_(options.sharded) {
  std::vector<ParameterSpec> specs;
  for (const ModelParameter& parameter : parameters_) specs.push_back(specOf(parameter, options));
  LayoutOptions layoutOptions{.worldSize = groups.dense.group->getSize(),
                              .expertWorldSize = groups.experts.group->getSize(),
                              .sharded = options.sharded,
                              .padForBusBandwidth = options.padForBusBandwidth};
  layoutOptions.bucketSize.reset();
  if (options.isBucketed) layoutOptions.bucketSize = bucketSizeOf(options, groups);
  Result<Layout> layout = layoutBuckets(specs, layoutOptions);
  TORCH_CHECK_VALUE(layout, "farandole.ddp: ", layout.status().toString());
  layout_ = std::move(*layout);
  bucketGroups_ =
      groupBuckets(layout_, {.isSingle = options.inOneGroup, .quantizedType = static_cast<int>(kQuantizedStorage)});

  c10::NoGradGuard noGrad;
  for (const BufferLayout& buffer : layout_.buffers) {
    grads_.emplace_back(buffer.numel, at::dtype(static_cast<at::ScalarType>(buffer.gradType)).device(device()));
    if (sharded_) {
      data_.emplace_back(buffer.numel, at::dtype(static_cast<at::ScalarType>(buffer.paramType)).device(device()));
    }
  }
  for (size_t p = 0; p < parameters_.size(); ++p) {
    at::Tensor& tensor = parameters_[p].tensor;
    const Slot& slot = layout_.slots[p];
    // Parts of parameters are known by their place in the flattened one, whoever has which strides.
    mainGrads_.push_back(grads_[slot.buffer].like(tensor, slot.offset, sharded_));
    places_.push_back(grads_[slot.buffer].like(tensor, slot.offset, sharded_));
    if (!sharded_) continue;
    at::Tensor data = data_[slot.buffer].like(tensor, slot.offset, true).view(tensor.scalar_type());
    data.copy_(tensor.detach());
    tensor.set_data(data);
  }
}

at::Tensor ModelBuffers::gradsOf(int bucket) const {
  const BucketLayout& range = layout_.buckets[bucket];
  return grads_[range.buffer].range(range.begin, range.end);
}

at::Tensor ModelBuffers::parametersOf(int bucket) const {
  const BucketLayout& range = layout_.buckets[bucket];
  return data_.at(range.buffer).range(range.begin, range.end);
}

void ModelBuffers::moveGrad(int parameter, const at::Tensor& grad) { place(mainGrads_[parameter], grad); }

void ModelBuffers::forgetMoved(int parameter) {
  if (!isAsMade(parameter)) {
    mainGrads_[parameter].set_data(places_[parameter]);
  } else if (isElsewhere(parameter)) {
    place(mainGrads_[parameter], places_[parameter]);
  }
}

bool ModelBuffers::isElsewhere(int parameter) const {
  const at::Tensor& grad = mainGrads_[parameter];
  const at::Tensor& place = places_[parameter];
  return !grad.is_alias_of(place) || grad.storage_offset() != place.storage_offset();
}

bool ModelBuffers::isAsMade(int parameter) const {
  const at::Tensor& grad = mainGrads_[parameter];
  const at::Tensor& place = places_[parameter];
  return grad.scalar_type() == place.scalar_type() && grad.sizes() == place.sizes() &&
         grad.strides() == place.strides() && grad.device() == place.device();
}

void ModelBuffers::returnGrad(int parameter) {
  if (!hasMoved(parameter)) return;
  c10::NoGradGuard noGrad;
  const at::Tensor held = at::alias(mainGrads_[parameter]);
  forgetMoved(parameter);
  mainGrads_[parameter].copy_(held);
}

std::vector<at::Tensor> ModelBuffers::partsOf(int bucket, const std::vector<at::Tensor>& elsewhere) const {
  const BucketLayout& range = layout_.buckets[bucket];
  std::vector<at::Tensor> parts;
  int64_t reached = range.begin;
  const auto fillUpTo = [&](int64_t end) {
    if (reached < end) parts.push_back(grads_[range.buffer].range(reached, end));
  };
  for (int parameter : range.parameters) {
    if (!elsewhere[parameter].defined()) continue;
    const Slot& slot = layout_.slots[parameter];
    fillUpTo(slot.offset);
    parts.push_back(elsewhere[parameter]);
    reached = slot.offset + slot.numel;
  }
  if (!parts.empty()) fillUpTo(range.end);
  return parts;
}

void ModelBuffers::freeGrads() {
  for (FlatBuffer& buffer : grads_) buffer.free();
}

void ModelBuffers::restoreGrads() {
  for (FlatBuffer& buffer : grads_) buffer.restore();
}

void ModelBuffers::zeroGrads() {
  for (FlatBuffer& buffer : grads_) buffer.zero();
}

void ModelBuffers::scaleGrads(double factor) {
  c10::NoGradGuard noGrad;
  // What nobody has written to is not to be touched; nor what pads gradients, where zero times infinity would stay.
  std::vector<char> isTorn(grads_.size(), std::isfinite(factor) ? 0 : 1);
  for (size_t p = 0; p < mainGrads_.size(); ++p) {
    if (hasMoved(static_cast<int>(p))) isTorn[layout_.slots[p].buffer] = 1;
  }
  for (size_t b = 0; b < grads_.size(); ++b) {
    if (!isTorn[b]) grads_[b].scale(factor);
  }
  for (size_t p = 0; p < mainGrads_.size(); ++p) {
    if (isTorn[layout_.slots[p].buffer]) mainGrads_[p].mul_(factor);
  }
}

}  // namespace farandole::ddp
