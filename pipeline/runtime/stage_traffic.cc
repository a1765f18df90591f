#include "pipeline/runtime/stage_traffic.h"

#include <algorithm>
#include <span>

#include "pipeline/runtime/input_gradient.h"
#include "pipeline/runtime/shape_exchange.h"

namespace farandole::pipeline {

namespace {

void setHeader(Transfer& transfer, bool isSend, at::Tensor header, std::int32_t edge, std::int32_t microbatch) {
  Message& message = transfer.header;
  transfer.hasHeader = true;
  message.isSend = isSend;
  message.tag = messageTag(Traffic::kHeader, edge, microbatch, 0);
  message.tensor[0] = std::move(header);
}

// One message of a transfer after another; those of earlier steps are used again.
class MessageWriter {
 public:
  MessageWriter(Transfer& transfer, bool isSend, Traffic traffic, std::int32_t edge, std::int32_t microbatch)
      : messages_(transfer.messages), isSend_(isSend), traffic_(traffic), edge_(edge), microbatch_(microbatch) {}
  MessageWriter(const MessageWriter&) = delete;
  MessageWriter& operator=(const MessageWriter&) = delete;
  ~MessageWriter() { messages_.resize(count_); }

  // `place`: of the tensor among those of the edge.
  void add(at::Tensor tensor, std::size_t place) {
    if (messages_.size() <= count_) messages_.emplace_back();
    Message& message = messages_[count_++];
    message.isSend = isSend_;
    message.tag = messageTag(traffic_, edge_, microbatch_, static_cast<std::int32_t>(place));
    message.tensor[0] = std::move(tensor);
  }

 private:
  std::vector<Message>& messages_;
  const bool isSend_;
  const Traffic traffic_;
  const std::int32_t edge_, microbatch_;
  std::size_t count_ = 0;
};

// Whether the memory of output `place` is another's that is handed over, on this edge or on others.
bool goesTwice(Stage& stage, std::size_t link, std::int32_t place, const std::vector<at::Tensor>& outputs) {
  for (std::size_t other = 0; other < stage.program.outOf.size(); ++other) {
    const std::span<const std::int32_t> over = stage.outputsOver(other, outputs.size());
    const bool isAgain = std::ranges::any_of(
        over, [&](std::int32_t i) { return (other != link || i != place) && outputs[i].is_alias_of(outputs[place]); });
    if (isAgain) return true;
  }
  return false;
}

// Whether its memory is a parameter's.
bool isOfLeaf(const at::Tensor& output) {
  const at::TensorBase& base = output.is_view() ? output._base() : output;
  return base.requires_grad() && base.is_leaf();
}

void giveBack(Transfer& transfer, ActivationStore& store) {
  for (Message& message : transfer.messages) {
    if (message.tensor[0].defined()) store.give(std::move(message.tensor[0]));
    message.tensor[0] = at::Tensor();
  }
  transfer.release();
}

}  // namespace

at::Tensor StageTraffic::wireForm(const at::Tensor& tensor) const {
  const at::Tensor dense = tensor.detach().resolve_conj().resolve_neg().contiguous();
  return learning_ ? dense.to(at::kCPU) : dense;
}

at::Tensor StageTraffic::fromWire(const at::Tensor& tensor, const TensorMeta& meta) const {
  return learning_ ? tensor.to(meta.deviceOn(device_)) : tensor;
}

void StageTraffic::beginStep(bool learning, bool isCaptured) {
  isCaptured_ = isCaptured;
  if (learning_ && !device_.is_cpu()) store_.clear();  // they are the host's
  learning_ = learning;
  if (learning) return reset(true);
  if (isConnected_ || device_.is_cpu()) return;
  const std::vector<int> peers = program_.peers();
  channel_->connect(device_, peers);
  isConnected_ = true;
}

void StageTraffic::post(const Instruction& instruction) {
  for (std::uint32_t i = 0; i < instruction.numTransfers; ++i) {
    addToBatch(program_.transfers[instruction.firstTransfer + i], instruction.peer);
  }
  flushBatch(instruction.peer);
  if (!isCaptured_) releaseSent();
}

// An output that has left is needed no more: what backward wants of it, its graph has saved.
void StageTraffic::releaseSent() {
  auto left = sending_.begin();
  for (; left != sending_.end() && (*left)->isDone(); ++left) (*left)->releaseTensors();
  sending_.erase(sending_.begin(), left);
}

void StageTraffic::addToBatch(const TransferRef& ref, std::int32_t peer) {
  Stage& stage = stages_[ref.stage];
  MicrobatchSlot& slot = stage.slots[ref.microbatch];
  switch (ref.kind) {
    case ActionKind::kRecvF: {
      IncomingEdge& edge = slot.into[ref.link];
      const std::int32_t number = stage.program.into[ref.link].edge;
      Transfer& transfer = edge.receiveActivation;
      if (learning_) {
        setHeader(transfer, false, emptyHeader(), number, ref.microbatch);
        batch_.push_back(&transfer.header);
      } else {
        prepareActivation(edge, number, ref.microbatch);
        addMessages(transfer);
      }
      return;
    }
    case ActionKind::kSendF: addActivation(stage, ref); return;
    case ActionKind::kRecvB:
      // Before the forward of a step that learns nothing is known: awaitGradient() posts then.
      if (slot.outputPoisoned || !slot.outputsKnown) return;
      prepareGradients(stage, ref.link, ref.microbatch);
      addMessages(slot.outOf[ref.link].receiveGradient);
      return;
    default:
      if (!slot.into[ref.link].isPoisoned) addMessages(slot.into[ref.link].sendGradient);
      return;
  }
}

void StageTraffic::addActivation(Stage& stage, const TransferRef& ref) {
  MicrobatchSlot& slot = stage.slots[ref.microbatch];
  Transfer& transfer = slot.outOf[ref.link].sendActivation;
  if (learning_) {
    // The executor has checked that the metas fit a header.
    std::vector<TensorMeta> metas;
    if (!slot.outputPoisoned) {
      for (const std::int32_t i : stage.outputsOver(ref.link, slot.outputMetas.size())) {
        metas.push_back(slot.outputMetas[i]);
      }
    }
    at::Tensor header = slot.outputPoisoned ? poisonedHeader() : *encodeHeader(metas);
    setHeader(transfer, true, std::move(header), stage.program.outOf[ref.link].edge, ref.microbatch);
    batch_.push_back(&transfer.header);
  }
  if (!slot.outputPoisoned) addMessages(transfer);
  sending_.push_back(&transfer);
}

void StageTraffic::addMessages(Transfer& transfer) {
  transfer.posted = true;
  for (Message& message : transfer.messages) batch_.push_back(&message);
}

void StageTraffic::flushBatch(std::int32_t peer) {
  if (!batch_.empty()) channel_->post(peer, batch_);
  batch_.clear();
}

void StageTraffic::prepareActivation(IncomingEdge& edge, std::int32_t number, std::int32_t microbatch) {
  MessageWriter writer(edge.receiveActivation, false, Traffic::kActivation, number, microbatch);
  for (std::size_t i = 0; i < edge.metas.size(); ++i) {
    writer.add(store_.take(edge.metas[i], wireDevice(edge.metas[i])), i);
  }
}

void StageTraffic::prepareGradients(Stage& stage, std::size_t link, std::int32_t microbatch) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  const std::span<const std::int32_t> outputs = stage.outputsOver(link, slot.outputMetas.size());
  MessageWriter writer(slot.outOf[link].receiveGradient, false, Traffic::kGradient, stage.program.outOf[link].edge,
                       microbatch);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const TensorMeta& meta = slot.outputMetas[outputs[i]];
    if (meta.requiresGrad) writer.add(store_.take(meta, wireDevice(meta)), i);
  }
}

Status StageTraffic::awaitActivations(Stage& stage, std::int32_t microbatch) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  slot.inputs.clear();
  for (std::size_t i = 0; i < slot.into.size(); ++i) {
    IncomingEdge& edge = slot.into[i];
    const StageLink& link = stage.program.into[i];
    if (link.isLocal()) {
      takeLocal(link, edge, microbatch, slot.inputs);
    } else {
      FARANDOLE_RETURN_IF_ERROR(receive(link, edge, microbatch));
      if (edge.isPoisoned) continue;
      for (std::size_t place = 0; place < edge.metas.size(); ++place) {
        const at::Tensor& came = edge.receiveActivation.messages[place].tensor[0];
        slot.inputs.push_back(fromWire(came, edge.metas[place]).detach());
      }
    }
  }
  if (slot.isInputPoisoned() || !program_.hasBackward) return Status::ok();
  slot.inputGradients.resize(slot.inputs.size());
  std::size_t input = 0;
  for (const IncomingEdge& edge : slot.into) {
    for (const TensorMeta& meta : edge.metas) {
      torch::autograd::Edge& gradient = slot.inputGradients[input];
      meta.requiresGrad ? requireInputGradient(slot.inputs[input], gradient) : gradient.function.reset();
      ++input;
    }
  }
  return Status::ok();
}

Status StageTraffic::receive(const StageLink& link, IncomingEdge& edge, std::int32_t microbatch) {
  Transfer& transfer = edge.receiveActivation;
  if (learning_) {
    transfer.waitHeader();
    auto metas = decodeHeader(transfer.header.tensor[0]);
    if (!metas) return metas.status();
    edge.isPoisoned = !metas->has_value();
    if (edge.isPoisoned) return Status::ok();
    edge.metas = std::move(**metas);
    prepareActivation(edge, link.edge, microbatch);
    addMessages(transfer);
    flushBatch(link.rank);
  }
  transfer.wait();
  return Status::ok();
}

void StageTraffic::takeLocal(const StageLink& link, IncomingEdge& edge, std::int32_t microbatch,
                             std::vector<at::Tensor>& inputs) {
  Stage& from = stages_[link.local];
  MicrobatchSlot& source = from.slots[microbatch];
  edge.isPoisoned = source.outputPoisoned;
  if (learning_) {
    edge.metas.clear();
    for (const std::int32_t i : from.outputsOver(link.place, source.outputMetas.size())) {
      if (!edge.isPoisoned) edge.metas.push_back(source.outputMetas[i]);
    }
  }
  std::vector<at::Tensor>& outputs = source.outOf[link.place].outputs;
  for (at::Tensor& output : outputs) inputs.push_back(std::move(output));
  outputs.clear();
}

void StageTraffic::awaitGradients(Stage& stage, std::int32_t microbatch) {
  if (stage.isLast()) return;
  MicrobatchSlot& slot = stage.slots[microbatch];
  slot.outputGrads.clear();
  if (slot.outputPoisoned) return;
  for (std::size_t i = 0; i < slot.outOf.size(); ++i) {
    OutgoingEdge& edge = slot.outOf[i];
    if (!stage.program.outOf[i].isLocal()) {
      awaitGradient(stage, i, microbatch);
      for (const Message& message : edge.receiveGradient.messages) {
        slot.outputGrads.push_back(fromWire(message.tensor[0], {}));
      }
    }
    for (at::Tensor& grad : edge.grads) slot.outputGrads.push_back(std::move(grad));
    edge.grads.clear();
  }
}

void StageTraffic::awaitGradient(Stage& stage, std::size_t link, std::int32_t microbatch) {
  Transfer& transfer = stage.slots[microbatch].outOf[link].receiveGradient;
  if (!transfer.posted) {
    prepareGradients(stage, link, microbatch);
    addMessages(transfer);
    flushBatch(stage.program.outOf[link].rank);
  }
  transfer.wait();
}

void StageTraffic::setOutputs(Stage& stage, std::int32_t microbatch, const std::vector<at::Tensor>& outputs) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  for (std::size_t link = 0; link < slot.outOf.size(); ++link) {
    OutgoingEdge& edge = slot.outOf[link];
    const std::span<const std::int32_t> over =
        outputs.empty() ? std::span<const std::int32_t>() : stage.outputsOver(link, outputs.size());
    if (stage.program.outOf[link].isLocal()) {
      edge.outputs.clear();
      for (const std::int32_t i : over) {
        // The stage may change it in place, but not a parameter, nor what others read, too.
        const bool isShared = isOfLeaf(outputs[i]) || goesTwice(stage, link, i, outputs);
        edge.outputs.push_back(isShared ? outputs[i].detach().clone() : outputs[i].detach());
      }
    } else {
      MessageWriter writer(edge.sendActivation, true, Traffic::kActivation, stage.program.outOf[link].edge, microbatch);
      for (std::size_t i = 0; i < over.size(); ++i) writer.add(wireForm(outputs[over[i]]), i);
    }
  }
}

void StageTraffic::setInputGrads(Stage& stage, std::int32_t microbatch, std::vector<at::Tensor>& grads) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  std::size_t input = 0;
  for (std::size_t i = 0; i < slot.into.size(); ++i) {
    IncomingEdge& edge = slot.into[i];
    const StageLink& link = stage.program.into[i];
    if (edge.isPoisoned) continue;
    const std::size_t first = input;
    input += edge.metas.size();
    if (link.isLocal()) {
      std::vector<at::Tensor>& to = stages_[link.local].slots[microbatch].outOf[link.place].grads;
      to.clear();
      for (std::size_t place = first; place < input; ++place) {
        if (grads[place].defined()) to.push_back(std::move(grads[place]));
      }
    } else {
      MessageWriter writer(edge.sendGradient, true, Traffic::kGradient, link.edge, microbatch);
      for (std::size_t place = first; place < input; ++place) {
        if (grads[place].defined()) writer.add(wireForm(grads[place]), place - first);
      }
    }
  }
}

void StageTraffic::waitSends(const Instruction& instruction) {
  // A step that learns posts the receives of data late, where the plan was not
  // proven for waiting here: finishStep() waits instead.
  if (learning_) return;
  MicrobatchSlot& slot = stages_[instruction.stage].slots[instruction.microbatch];
  for (OutgoingEdge& edge : slot.outOf) {
    if (instruction.activation) edge.sendActivation.wait();
  }
  for (IncomingEdge& edge : slot.into) {
    if (instruction.gradient) edge.sendGradient.wait();
  }
}

void StageTraffic::releaseArrived(Stage& stage, const Instruction& forward) {
  for (std::uint32_t i = 0; i < forward.numArrived; ++i) {
    const SentGradient& sent = program_.arrived[forward.firstArrived + i];
    stage.slots[sent.microbatch].into[sent.link].sendGradient.releaseTensors();
  }
}

void StageTraffic::releaseInputs(MicrobatchSlot& slot) {
  slot.inputs.clear();
  slot.outputGrads.clear();
  for (IncomingEdge& edge : slot.into) giveBack(edge.receiveActivation, store_);
  for (OutgoingEdge& edge : slot.outOf) {
    // A gradient that came back proves that the activation has arrived.
    if (!edge.receiveGradient.messages.empty() && edge.receiveGradient.posted) {
      edge.sendActivation.wait();
      edge.sendActivation.release();
    }
    giveBack(edge.receiveGradient, store_);
  }
}

void StageTraffic::finishStep() {
  sending_.clear();
  for (Stage& stage : stages_) {
    for (MicrobatchSlot& slot : stage.slots) {
      for (OutgoingEdge& edge : slot.outOf) {
        edge.sendActivation.wait();
        edge.receiveGradient.wait();
        edge.sendActivation.release();
      }
      for (IncomingEdge& edge : slot.into) {
        edge.sendGradient.wait();
        edge.receiveActivation.wait();
        edge.sendGradient.release();
      }
    }
  }
}

void StageTraffic::reset(bool shapes) {
  sending_.clear();
  for (Stage& stage : stages_) stage.reset(shapes);
  if (shapes) store_.clear();
}

}  // namespace farandole::pipeline
