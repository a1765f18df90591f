#include "pipeline/runtime/stage.h"

namespace farandole::pipeline {

namespace {

void waitFor(Message& message) {
  if (!message.work) return;
  message.work->wait();
  message.work.reset();
}

}  // namespace

void Transfer::wait() {
  if (header) waitFor(*header);
  for (Message& message : messages) waitFor(message);
}

void Transfer::waitHeader() {
  if (header) waitFor(*header);
}

bool Transfer::isDone() const {
  for (const Message& message : messages) {
    if (message.work && !message.work->isCompleted()) return false;
  }
  return true;
}

void Transfer::release() {
  header.reset();
  for (Message& message : messages) {
    message.tensor[0].reset();
    message.work.reset();
  }
  headerPosted = posted = false;
}

void Stage::reset(bool shapes) {
  for (MicrobatchSlot& slot : slots) {
    for (Transfer* transfer :
         {&slot.receiveActivation, &slot.sendActivation, &slot.receiveGradient, &slot.sendGradient}) {
      transfer->release();
    }
    slot.inputs.clear();
    slot.outputs.clear();
    slot.roots.clear();
    slot.outputGrads.clear();
    slot.inputPoisoned = slot.outputPoisoned = false;
    if (shapes) slot.inputsKnown = slot.outputsKnown = false;
  }
}

}  // namespace farandole::pipeline
