#include "pipeline/runtime/stage_traffic.h"

#include "pipeline/runtime/shape_exchange.h"

namespace farandole::pipeline {

namespace {

Message headerMessage(bool isSend, at::Tensor header, std::int32_t sendingStage, std::int32_t microbatch) {
  Message message;
  message.isSend = isSend;
  message.isOnce = true;
  message.tag = messageTag(Traffic::kHeader, sendingStage, microbatch, 0);
  message.tensor[0] = std::move(header);
  return message;
}

void setMessage(Message& message, bool isSend, at::Tensor tensor, std::int32_t tag) {
  message.isSend = isSend;
  message.tag = tag;
  message.tensor[0] = std::move(tensor);
}

// The bytes that the peer expects: dense, and not a lazy conjugate or negative.
at::Tensor wireForm(const at::Tensor& tensor) { return tensor.detach().resolve_conj().resolve_neg().contiguous(); }

void giveBack(Transfer& transfer, ActivationStore& store) {
  for (Message& message : transfer.messages) {
    if (message.tensor[0].defined()) store.give(std::move(message.tensor[0]));
    message.tensor[0] = at::Tensor();
  }
  transfer.release();
}

}  // namespace

void StageTraffic::beginStep(bool learning) {
  learning_ = learning;
  if (learning) reset(true);
}

void StageTraffic::post(const Step& step) {
  for (std::uint32_t i = 0; i < step.numTransfers; ++i) {
    addToBatch(program_.transfers[step.firstTransfer + i], step.peer);
  }
  flushBatch(step.peer);
  releaseSent();
}

// An output that has left is needed no more: what backward wants of it, its graph has saved.
void StageTraffic::releaseSent() {
  while (!sending_.empty() && sending_.front()->isDone()) {
    sending_.front()->releaseTensors();
    sending_.pop_front();
  }
}

void StageTraffic::addToBatch(const TransferRef& ref, std::int32_t peer) {
  Stage& stage = stages_[ref.stage];
  MicrobatchSlot& slot = stage.slots[ref.microbatch];
  const std::int32_t index = stage.spec.index;
  switch (ref.kind) {
    case ActionKind::kRecvF:
      if (learning_) {
        slot.receiveActivation.header = headerMessage(false, emptyHeader(), index - 1, ref.microbatch);
        slot.receiveActivation.headerPosted = true;
        batch_.push_back(&*slot.receiveActivation.header);
      } else {
        prepareReceive(slot.receiveActivation, slot.inputMetas, false, Traffic::kActivation, index - 1, ref.microbatch);
        addMessages(slot.receiveActivation);
      }
      return;
    case ActionKind::kSendF:
      if (learning_) {
        // The executor has checked that the metas fit a header.
        at::Tensor header = slot.outputPoisoned ? poisonedHeader() : *encodeHeader(slot.outputMetas);
        slot.sendActivation.header = headerMessage(true, std::move(header), index, ref.microbatch);
        batch_.push_back(&*slot.sendActivation.header);
      }
      if (!slot.outputPoisoned) addMessages(slot.sendActivation);
      sending_.push_back(&slot.sendActivation);
      return;
    case ActionKind::kRecvB:
      // Before the forward of a step that learns nothing is known: awaitGradient() posts then.
      if (slot.outputPoisoned || !slot.outputsKnown) return;
      prepareReceive(slot.receiveGradient, slot.outputMetas, true, Traffic::kGradient, index + 1, ref.microbatch);
      addMessages(slot.receiveGradient);
      return;
    default:
      if (!slot.inputPoisoned) addMessages(slot.sendGradient);
      return;
  }
}

void StageTraffic::addMessages(Transfer& transfer) {
  transfer.posted = true;
  for (Message& message : transfer.messages) batch_.push_back(&message);
}

void StageTraffic::flushBatch(std::int32_t peer) {
  if (!batch_.empty()) channel_->post(peer, batch_);
  batch_.clear();
}

void StageTraffic::prepareReceive(Transfer& transfer, const std::vector<TensorMeta>& metas, bool gradientsOnly,
                                  Traffic traffic, std::int32_t sendingStage, std::int32_t microbatch) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < metas.size(); ++i) {
    if (gradientsOnly && !metas[i].requiresGrad) continue;
    if (transfer.messages.size() <= count) transfer.messages.emplace_back();
    setMessage(transfer.messages[count++], false, store_.take(metas[i]),
               messageTag(traffic, sendingStage, microbatch, static_cast<std::int32_t>(i)));
  }
  transfer.messages.resize(count);
}

Status StageTraffic::awaitActivation(Stage& stage, std::int32_t microbatch) {
  if (stage.previousIsLocal) {
    takeLocalInputs(stage, microbatch);
    return Status::ok();
  }
  MicrobatchSlot& slot = stage.slots[microbatch];
  Transfer& transfer = slot.receiveActivation;
  if (learning_) {
    transfer.waitHeader();
    auto metas = decodeHeader(transfer.header->tensor[0]);
    if (!metas) return metas.status();
    slot.inputPoisoned = !metas->has_value();
    if (slot.inputPoisoned) return Status::ok();
    slot.inputMetas = std::move(**metas);
    slot.inputsKnown = true;
    const std::int32_t peer = program_.rankOfStage[stage.spec.index - 1];
    prepareReceive(transfer, slot.inputMetas, false, Traffic::kActivation, stage.spec.index - 1, microbatch);
    addMessages(transfer);
    flushBatch(peer);
  }
  transfer.wait();
  slot.inputs.resize(slot.inputMetas.size());
  for (std::size_t i = 0; i < slot.inputs.size(); ++i) {
    slot.inputs[i] = transfer.messages[i].tensor[0].detach();
    if (slot.inputMetas[i].requiresGrad && program_.hasBackward) slot.inputs[i].set_requires_grad(true);
  }
  return Status::ok();
}

void StageTraffic::takeLocalInputs(Stage& stage, std::int32_t microbatch) {
  MicrobatchSlot& from = stages_[&stage - stages_.data() - 1].slots[microbatch];
  MicrobatchSlot& slot = stage.slots[microbatch];
  slot.inputPoisoned = from.outputPoisoned;
  if (learning_) slot.inputMetas = from.outputMetas;
  slot.inputsKnown = from.outputsKnown;
  slot.inputs.swap(from.outputs);
  from.outputs.clear();
  if (!program_.hasBackward) return;
  for (std::size_t i = 0; i < slot.inputs.size(); ++i) {
    if (slot.inputMetas[i].requiresGrad) slot.inputs[i].set_requires_grad(true);
  }
}

void StageTraffic::awaitGradient(Stage& stage, std::int32_t microbatch) {
  if (stage.isLast || stage.nextIsLocal) return;
  MicrobatchSlot& slot = stage.slots[microbatch];
  Transfer& transfer = slot.receiveGradient;
  slot.outputGrads.clear();
  if (slot.outputPoisoned) return;
  if (!transfer.posted) {
    prepareReceive(transfer, slot.outputMetas, true, Traffic::kGradient, stage.spec.index + 1, microbatch);
    addMessages(transfer);
    flushBatch(program_.rankOfStage[stage.spec.index + 1]);
  }
  transfer.wait();
  for (const Message& message : transfer.messages) slot.outputGrads.push_back(message.tensor[0]);
}

void StageTraffic::setOutputs(Stage& stage, std::int32_t microbatch, const std::vector<at::Tensor>& outputs) {
  if (stage.nextIsLocal) {
    for (const at::Tensor& output : outputs) stage.slots[microbatch].outputs.push_back(output.detach());
    return;
  }
  Transfer& transfer = stage.slots[microbatch].sendActivation;
  transfer.messages.resize(outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    setMessage(transfer.messages[i], true, wireForm(outputs[i]),
               messageTag(Traffic::kActivation, stage.spec.index, microbatch, static_cast<std::int32_t>(i)));
  }
}

void StageTraffic::setInputGrads(Stage& stage, std::int32_t microbatch, std::vector<at::Tensor>& grads) {
  if (stage.previousIsLocal) {
    MicrobatchSlot& to = stages_[&stage - stages_.data() - 1].slots[microbatch];
    to.outputGrads.clear();
    for (at::Tensor& grad : grads) {
      if (grad.defined()) to.outputGrads.push_back(std::move(grad));
    }
    return;
  }
  MicrobatchSlot& slot = stage.slots[microbatch];
  std::size_t count = 0;
  for (std::size_t i = 0; i < slot.inputMetas.size(); ++i) {
    if (!slot.inputMetas[i].requiresGrad) continue;
    if (slot.sendGradient.messages.size() <= count) slot.sendGradient.messages.emplace_back();
    setMessage(slot.sendGradient.messages[count++], true, wireForm(grads[i]),
               messageTag(Traffic::kGradient, stage.spec.index, microbatch, static_cast<std::int32_t>(i)));
  }
  slot.sendGradient.messages.resize(count);
}

void StageTraffic::waitSends(const Step& step) {
  // A step that learns posts the receives of data late, where the plan was not
  // proven for waiting here: finishStep() waits instead.
  if (learning_) return;
  MicrobatchSlot& slot = stages_[step.stage].slots[step.microbatch];
  if (step.activation) slot.sendActivation.wait();
  if (step.gradient) slot.sendGradient.wait();
}

void StageTraffic::releaseInputs(MicrobatchSlot& slot) {
  slot.inputs.clear();
  slot.outputGrads.clear();
  giveBack(slot.receiveActivation, store_);
  // A gradient that came back proves that the activation has arrived.
  if (!slot.receiveGradient.messages.empty() && slot.receiveGradient.posted) {
    slot.sendActivation.wait();
    slot.sendActivation.release();
  }
  giveBack(slot.receiveGradient, store_);
}

void StageTraffic::finishStep() {
  sending_.clear();
  for (Stage& stage : stages_) {
    for (MicrobatchSlot& slot : stage.slots) {
      slot.sendActivation.wait();
      slot.sendGradient.wait();
      slot.receiveActivation.wait();
      slot.receiveGradient.wait();
      slot.sendActivation.release();
      slot.sendGradient.release();
    }
  }
}

void StageTraffic::reset(bool shapes) {
  sending_.clear();
  for (Stage& stage : stages_) stage.reset(shapes);
  if (shapes) store_.clear();
}

}  // namespace farandole::pipeline
