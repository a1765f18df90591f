#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/bucket_groups.h"
#include "ddp/bucket_layout.h"
#include "ddp/flat_buffer.h"
#include "ddp/model_agreement.h"
#include "ddp/reduction.h"

namespace farandole::ddp {

struct BufferOptions {
  std::optional<int64_t> bucketSize = std::nullopt;  // elements; by default max(40e6, 1e6 * ranks), as Megatron-core's
  bool isBucketed = true;                            // false: one bucket for each buffer
  bool inOneGroup = false;                           // buckets are reduced all together
  std::optional<at::ScalarType> gradType =
      std::nullopt;      // of the buffers of gradients; by default each parameter's own
  bool sharded = false;  // parameters move into buffers, too, of which each rank owns a part
  bool padForBusBandwidth = false;
};

// The contiguous buffers of a model's trainable parameters: of gradients, and where
// sharded of the parameters themselves, which become views of them. Immutable but
// for the buffers' contents, and for gradients that have moved out of them.
class ModelBuffers {
 public:
  // Of the trainable parameters of a model that refusalOf() has nothing against.
  ModelBuffers(const Model& model, const DataParallelGroups& groups, const BufferOptions& options);

  const std::vector<ModelParameter>& parameters() const { return parameters_; }
  const Layout& layout() const { return layout_; }
  const std::vector<BucketGroupLayout>& bucketGroups() const { return bucketGroups_; }
  bool isSharded() const { return sharded_; }
  // Without parameters nothing is on any.
  c10::Device device() const { return parameters_.empty() ? c10::Device(at::kCPU) : parameters_[0].tensor.device(); }

  // Gradients by parameter, with its shape: views of the buffers, but for those that have moved.
  // Whoever has `.grad` has the same tensors.
  const std::vector<at::Tensor>& mainGrads() const { return mainGrads_; }

  // False where somebody has made it another tensor, with `.grad.data = ...` as module.double() does: of another type,
  // device or form, until forgetMoved() or returnGrad(). The shape is that of the parameter when it was wrapped.
  bool isAsMade(int parameter) const;
  at::IntArrayRef shapeOf(int parameter) const { return places_[parameter].sizes(); }

  // All of a bucket's buffer, flat, padding included.
  at::Tensor gradsOf(int bucket) const;
  at::Tensor parametersOf(int bucket) const;  // where sharded

  // The parameter's gradient is what this tensor holds, and where it holds it: of the same type, shape and strides.
  void moveGrad(int parameter, const at::Tensor& grad);
  bool hasMoved(int parameter) const { return isElsewhere(parameter) || !isAsMade(parameter); }
  bool isElsewhere(int parameter) const;  // the same, of one that is as made
  // If it has, it is in the buffer again: whatever that holds, or with what it holds itself.
  void forgetMoved(int parameter);
  void returnGrad(int parameter);

  // Where a bucket's gradients lie, one after another, if those of some parameters lie there; empty if none does.
  std::vector<at::Tensor> partsOf(int bucket, const std::vector<at::Tensor>& elsewhere) const;

  // As FlatBuffer's, where no gradient has moved.
  void freeGrads();
  void restoreGrads();

  void zeroGrads();  // of those that are in the buffers
  void scaleGrads(double factor);

 private:
  std::vector<ModelParameter> parameters_;
  bool sharded_;
  Layout layout_;
  std::vector<BucketGroupLayout> bucketGroups_;
  std::vector<FlatBuffer> grads_;
  std::vector<FlatBuffer> data_;
  std::vector<at::Tensor> mainGrads_;
  std::vector<at::Tensor> places_;  // by parameter: what main_grad is in the buffer; nobody else has these
};

// As the layout sees them, in registration order.
std::vector<ParameterSpec> specsOf(const ModelBuffers& buffers);

// The trainable ones, in registration order.
std::vector<ModelParameter> trainableOf(const Model& model);

// Why this rank cannot be part of a data-parallel group; empty when it can.
std::string refusalOf(const Model& model, const BufferOptions& options);

// Elements of a bucket.
int64_t bucketSizeOf(const BufferOptions& options, const DataParallelGroups& groups);

}  // namespace farandole::ddp
