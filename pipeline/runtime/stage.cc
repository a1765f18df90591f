#include "pipeline/runtime/stage.h"

#include <algorithm>

namespace farandole::pipeline {

void Transfer::wait() {
  if (header) header->wait();
  for (Message& message : messages) message.wait();
}

void Transfer::waitHeader() {
  if (header) header->wait();
}

bool Transfer::isDone() const {
  return (!header || header->isDone()) && std::ranges::all_of(messages, &Message::isDone);
}

void Transfer::releaseTensors() {
  wait();
  for (Message& message : messages) message.tensor[0].reset();
}

void Transfer::release() {
  header.reset();
  for (Message& message : messages) message.release();
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
    slot.deferred = {};
    slot.hookedOps.clear();
    slot.inputPoisoned = slot.outputPoisoned = false;
    if (shapes) slot.inputsKnown = slot.outputsKnown = false;
  }
  if (shapes) savesThroughHooks = isBackwardWhole = false;
}

}  // namespace farandole::pipeline
