#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pipeline/runtime/p2p_channel.h"
#include "pipeline/runtime/packet.h"
#include "pipeline/runtime/program.h"
#include "pipeline/runtime/split_backward.h"
#include "pipeline/runtime/tensor_meta.h"

namespace farandole::pipeline {

// What a user gives for one stage. Called by the thread that runs the step,
// without the GIL.
struct StageSpec {
  std::int32_t index = 0;

  // Computes one microbatch. `inputs` is empty for the first stage, which has
  // its own; a stage with several stages before it gets their tensors one after another, the lowest stage's first.
  // `outputs` go to the stages after it; a last stage returns its loss alone when it trains, and may return nothing
  // otherwise. May throw.
  std::function<void(int microbatch, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs)> forward;

  // Which outputs go to a stage, by their places; all of them to one that is not named.
  std::map<std::int32_t, std::vector<std::int32_t>> outputsTo;

  // Optional: called before (`begins`) and after each B, I and W that succeeded. May throw, which fails the stage.
  std::function<void(int microbatch, bool begins)> aroundBackward;
  // Optional: what the forward is told of packets among its inputs, and tells of the one that it returns.
  std::shared_ptr<PacketNotes> packets;

  // Optional: turns gradient reduction across replicas off before the first
  // forward of a step, and on before the last backward.
  std::function<void(bool)> requireGradSync;

  // Optional, of a reduction that does not begin by itself: called after the last backward of a step, when all
  // gradients of the stage are there. May throw.
  std::function<void()> finishGradSync;

  // Its backwards are not taken apart: I computes everything.
  bool isNeverSplit = false;

  // Optional: called when this rank will not finish a step that began, so that
  // replicas do not wait for a reduction of it. Must not throw.
  std::function<void(const std::string& reason)> abandonGradSync;

  // Optional: of a stage whose own functions leave gradients of weights out of their backward. Called after each
  // backward of a microbatch, which is not taken apart; what it returns computes what was left out, at once after a B,
  // else in W. Both may throw.
  std::function<std::function<void()>()> buildWeightBackward;

  std::optional<std::vector<TensorMeta>> declaredInputs, declaredOutputs;  // per microbatch
};

// One send or receive of all tensors of one edge and microbatch.
struct Transfer {
  Message header;
  bool hasHeader = false;  // only while learning
  std::vector<Message> messages;
  bool posted = false;

  // Waits for all that is under way; throws what the transport throws.
  void wait();
  void waitHeader();
  // Whether wait() would return at once.
  bool isDone() const;
  // Of what is done: lets the tensors go, and keeps the messages for the next step.
  void releaseTensors();
  void release();
};

// State of one microbatch on an edge into a stage.
struct IncomingEdge {
  std::vector<TensorMeta> metas;  // known once learned
  bool isPoisoned = false;        // only while learning: nothing flows on this edge
  Transfer receiveActivation, sendGradient;
};

// State of one microbatch on an edge out of a stage. Tensors and gradients are moved here where both stages are on this
// rank.
struct OutgoingEdge {
  Transfer sendActivation, receiveGradient;
  std::vector<at::Tensor> outputs;  // for a stage on this rank
  std::vector<at::Tensor> grads;    // of the outputs that need one
};

// State of one microbatch in one stage, kept from step to step so that a
// steady step allocates nothing but tensors.
struct MicrobatchSlot {
  std::vector<IncomingEdge> into;   // as ProgramStage::into
  std::vector<OutgoingEdge> outOf;  // as ProgramStage::outOf
  std::vector<TensorMeta> outputMetas;
  bool outputsKnown = false;
  bool outputPoisoned = false;  // only while learning: nothing flows on the edges out of the stage

  std::vector<at::Tensor> inputs;              // that forward was given
  torch::autograd::edge_list inputGradients;   // of the inputs: where their gradients arrive, some empty
  torch::autograd::edge_list roots;            // of the outputs that need a gradient, edge by edge
  torch::autograd::variable_list outputGrads;  // of roots
  at::Tensor lossSeed;                         // of a last stage: the gradient of its loss, kept from step to step
  double lossScale = 0;                        // what lossSeed is filled with
  std::int64_t lossSeedVersion = 0;            // of lossSeed then: a hook may change it in place
  DeferredBackward deferred;                   // between I and W
  std::function<void()> deferredWeight;        // the same, of a stage with buildWeightBackward
  std::vector<std::uint64_t> hookedOps;        // of the forward: see SavedTensorHookWatch

  // A stage before has sent zeros for the packet that is expected of it. For inputs that are not poisoned.
  bool isPacketMissing() const;
  bool isInputPoisoned() const {
    return std::ranges::any_of(into, [](const IncomingEdge& edge) { return edge.isPoisoned; });
  }
};

// One stage of this rank. Owned and used by the executor.
class Stage {
 public:
  // `program` is this stage's and outlives it.
  Stage(StageSpec spec, const ProgramStage& program, int numMicrobatches);

  bool isFirst() const { return program.into.empty(); }
  bool isLast() const { return program.outOf.empty(); }
  // Its I computes everything that autograd does: because of what it is, or of what its graph has shown.
  bool isNeverSplit() const { return spec.isNeverSplit || spec.buildWeightBackward; }
  bool isInputBackwardWhole() const { return isBackwardWhole || isNeverSplit(); }

  // The places of the outputs that go over an edge, for so many outputs.
  std::span<const std::int32_t> outputsOver(std::size_t link, std::size_t numOutputs);

  // As if a step had learned them: every microbatch has the declared shapes; gradients flow for floating-point tensors.
  void takeDeclaredShapes(bool hasBackward);

  // Forgets what a step left; with `shapes`, also what was learned.
  void reset(bool shapes);

  StageSpec spec;
  const ProgramStage& program;
  std::vector<MicrobatchSlot> slots;
  bool savesThroughHooks = false;  // as a step that learned shapes has seen
  bool hasBegun = false;           // some forward of this step
  bool isSplit = false;            // some I of this step has left something for W
  bool isBackwardWhole = false;    // its I computes everything, for its reduction needs one backward to be the last
  bool isUnsplittableTold = false;

 private:
  std::vector<const std::vector<std::int32_t>*> selected_;  // [outOf] null: all outputs
  std::vector<std::int32_t> all_;                           // 0, 1, ...
};

}  // namespace farandole::pipeline
