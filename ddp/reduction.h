#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "backend/extension/gathered_reductions.h"
#include "ddp/collectives.h"

namespace farandole::ddp {

// The ranks that hold the same parameters, dense ones or experts.
struct Replicas {
  Group group;      // those that share optimizer state, or all
  Group instances;  // null, or those that hold the same part of it: group and instances make all ranks together

  int size() const { return group->getSize() * (instances ? instances->getSize() : 1); }
};

// Where a bucket's gradients lie, one after another, if not all are in its buffer; else nothing.
struct Parts {
  std::vector<at::Tensor> tensors;
  bool takeResult = false;  // each its part of it; else that goes to the buffer
};

// How the gradients of one kind of parameters become the sum over their replicas
// times a scale, in place: by an all-reduce, or, where each rank owns a part of
// every bucket, by a reduce-scatter, after which it has its part; then that part is
// summed up over the instances.
class Reduction {
 public:
  struct Options {
    double scale = 1;                  // of the sum
    bool sharded = false;              // reduce-scatter
    bool averageInCollective = false;  // AVG instead of SUM; where the backend has none, torch's error says so
    // A reduce-scatter of a short type adds up in float32 and rounds once: by an all-to-all and a sum of this rank's
    // own, unless the backend does so by itself.
    bool accumulatesInFloat = false;
  };

  Reduction(Replicas replicas, c10::DeviceType device, const Options& options);

  // What the first step has brought of each rank's, where this rank has yet to add it up; else undefined.
  using Received = at::Tensor;

  const Replicas& replicas() const { return replicas_; }

  // Of the reductions that start from now on.
  void setScale(double scale);

  // Whether it is the average of the replicas.
  bool isAverage() const { return isAverage_; }

  // This rank's part of `data`: all of it where nothing is sharded.
  at::Tensor partOf(const at::Tensor& data) const;

  // Whether startGroup() takes parts. What must be scaled first is as well copied.
  bool gathers() const { return gatherer_ != nullptr && factor_ == 1 && !accumulatesInFloat_; }
  // Whether it takes parts that take the result.
  bool reducesInPlaces() const { return reducesInPlaces_; }

  // Start the two steps. Null: nothing is to be done in it. What is to be reduced lies in `parts`, or, without any, in
  // `data`. `received` goes to finishGroup() when the first one has ended.
  WorkPtr startGroup(const Parts& parts, at::Tensor& data, Received& received) const;
  void finishGroup(Received& received, at::Tensor& part) const;
  WorkPtr startInstances(at::Tensor& part) const;

 private:
  WorkPtr startGroupFrom(const std::vector<at::Tensor>& inputs, at::Tensor& data) const;
  WorkPtr startInPlaces(const std::vector<at::Tensor>& parts) const;

  Replicas replicas_;
  bool sharded_;
  bool scatters_;  // by the backend's reduce-scatter
  bool averageInCollective_;
  bool accumulatesInFloat_;
  bool canAverage_;  // of itself
  bool isAverage_ = false;
  c10d::ReduceOp op_ = c10d::ReduceOp::SUM;
  double factor_ = 1;                          // of each rank's gradients, before
  c10::intrusive_ptr<c10d::Backend> backend_;  // owns gatherer_
  GatheredReductions* gatherer_ = nullptr;
  bool reducesInPlaces_ = false;
};

}  // namespace farandole::ddp
