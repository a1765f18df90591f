#pragma once

#include <memory>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/runtime/activation_store.h"
#include "pipeline/runtime/p2p_channel.h"
#include "pipeline/runtime/program.h"
#include "pipeline/runtime/stage.h"

namespace farandole::pipeline {

// Moves tensors between the slots of this rank's stages, and between them and
// other ranks: posts what a step of the program names, waits where a compute
// action needs it, and learns shapes. Owned and used by the executor; throws what
// the transport throws.
//
// A gradient flows back for exactly those tensors whose meta says that they
// require one; where an activation was poisoned, none does.
class StageTraffic {
 public:
  // `device`: where the stages are.
  StageTraffic(const Program& program, std::vector<Stage>& stages, std::unique_ptr<P2pChannel> channel,
               at::Device device)
      : program_(program), stages_(stages), channel_(std::move(channel)), device_(device) {}

  // In a step that learns, shapes come with headers and known ones are forgotten. Of one that is captured in a graph
  // nobody can ask what has been sent.
  void beginStep(bool learning, bool isCaptured);

  void post(const Instruction& instruction);

  // Sets the slot's inputs, unless one of its edges is poisoned. An error when a header makes no sense.
  Status awaitActivations(Stage& stage, std::int32_t microbatch);

  // Sets the slot's outputGrads where it is not the loss that they come from.
  void awaitGradients(Stage& stage, std::int32_t microbatch);

  // Hands tensors to the stages after or before: at once where those live on this rank, else to what post() will send,
  // detached and contiguous. `grads` are one for each input, undefined where none is needed.
  void setOutputs(Stage& stage, std::int32_t microbatch, const std::vector<at::Tensor>& outputs);
  void setInputGrads(Stage& stage, std::int32_t microbatch, std::vector<at::Tensor>& grads);

  void waitSends(const Instruction& instruction);

  // After the inputs of a forward have come: lets go of the gradients that must have arrived before.
  void releaseArrived(Stage& stage, const Instruction& forward);

  // Receive buffers go back to the store.
  void releaseInputs(MicrobatchSlot& slot);

  // Those that no step uses any more, between steps.
  void releaseBuffers() { store_.clear(); }

  // Waits for everything of the step and releases it.
  void finishStep();

  // Drops what a step left behind.
  void reset(bool shapes);

 private:
  Status receive(const StageLink& link, IncomingEdge& edge, std::int32_t microbatch);
  void takeLocal(const StageLink& link, IncomingEdge& edge, std::int32_t microbatch, std::vector<at::Tensor>& inputs);
  void awaitGradient(Stage& stage, std::size_t link, std::int32_t microbatch);
  void releaseSent();
  // Where a tensor is sent from, and received. While shapes are learned that is the host's memory, where messages
  // match by tags: receives are posted late then, in an order that the plan was not proven for.
  at::Device wireDevice(const TensorMeta& meta) const {
    return learning_ ? at::Device(at::kCPU) : meta.deviceOn(device_);
  }
  // The bytes that the peer expects: dense, and not a lazy conjugate or negative.
  at::Tensor wireForm(const at::Tensor& tensor) const;
  // On the stage's device, unless it is a packet.
  at::Tensor fromWire(const at::Tensor& tensor, const TensorMeta& meta) const;
  void addToBatch(const TransferRef& ref, std::int32_t peer);
  void addActivation(Stage& stage, const TransferRef& ref);
  void prepareActivation(IncomingEdge& edge, std::int32_t number, std::int32_t microbatch);
  void prepareGradients(Stage& stage, std::size_t link, std::int32_t microbatch);
  void addMessages(Transfer& transfer);
  void flushBatch(std::int32_t peer);

  const Program& program_;
  std::vector<Stage>& stages_;
  std::unique_ptr<P2pChannel> channel_;
  const at::Device device_;
  ActivationStore store_;
  std::vector<Message*> batch_;
  std::vector<Transfer*> sending_;  // activations that were posted and may not have left, in the order of posting
  bool learning_ = true;
  bool isConnected_ = false;  // the channel, for tensors on the device
  bool isCaptured_ = false;
};

}  // namespace farandole::pipeline
