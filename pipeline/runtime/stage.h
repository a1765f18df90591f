#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/runtime/p2p_channel.h"
#include "pipeline/runtime/split_backward.h"
#include "pipeline/runtime/tensor_meta.h"

namespace farandole::pipeline {

// What a user gives for one stage. Called by the thread that runs the step,
// without the GIL.
struct StageSpec {
  std::int32_t index = 0;

  // Computes one microbatch. `inputs` is empty for the first stage, which has
  // its own. `outputs` go to the next stage; the last stage returns its loss
  // alone when it trains, and may return nothing otherwise. May throw.
  std::function<void(int microbatch, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs)> forward;

  // Optional: turns gradient reduction across replicas off before the first
  // forward of a step, and on before the last backward.
  std::function<void(bool)> requireGradSync;

  // Optional: called when this rank will not finish a step that began, so that
  // replicas do not wait for a reduction of it. Must not throw.
  std::function<void(const std::string& reason)> abandonGradSync;

  std::optional<std::vector<TensorMeta>> declaredInputs, declaredOutputs;  // per microbatch
};

// One send or receive of all tensors of one edge and microbatch.
struct Transfer {
  std::optional<Message> header;  // only while learning
  std::vector<Message> messages;
  bool headerPosted = false, posted = false;

  // Waits for all that is under way; throws what the transport throws.
  void wait();
  void waitHeader();
  // Whether wait() would return at once.
  bool isDone() const;
  // Of what is done: lets the tensors go, and keeps the messages for the next step.
  void releaseTensors();
  void release();
};

// State of one microbatch in one stage, kept from step to step so that a
// steady step allocates nothing but tensors.
struct MicrobatchSlot {
  std::vector<TensorMeta> inputMetas, outputMetas;  // known once learned
  bool inputsKnown = false, outputsKnown = false;
  bool inputPoisoned = false, outputPoisoned = false;  // only while learning: nothing flows on that edge

  Transfer receiveActivation, sendActivation, receiveGradient, sendGradient;
  std::vector<at::Tensor> inputs;              // the leaves that forward was given
  std::vector<at::Tensor> outputs;             // for a next stage on the same rank
  torch::autograd::edge_list roots;            // of the outputs that need a gradient
  torch::autograd::variable_list outputGrads;  // from a next stage on the same rank, or the loss' seed
  DeferredBackward deferred;                   // between I and W
  std::vector<std::uint64_t> hookedOps;        // of the forward: see SavedTensorHookWatch
};

// One stage of this rank. Owned and used by the executor.
class Stage {
 public:
  Stage(StageSpec spec, int numStages, int numMicrobatches)
      : spec(std::move(spec)),
        isFirst(this->spec.index == 0),
        isLast(this->spec.index == numStages - 1),
        slots(numMicrobatches) {}

  // Forgets what a step left; with `shapes`, also what was learned.
  void reset(bool shapes);

  StageSpec spec;
  bool isFirst, isLast;
  bool previousIsLocal = false, nextIsLocal = false;
  bool splitsBackward = false;     // the plan has I and W of it
  bool savesThroughHooks = false;  // as a step that learned shapes has seen
  bool isSplit = false;            // some I of this step has left something for W
  bool isBackwardWhole = false;    // its I computes everything, for its reduction needs one backward to be the last
  bool isUnsplittableTold = false;
  std::vector<MicrobatchSlot> slots;
};

}  // namespace farandole::pipeline
