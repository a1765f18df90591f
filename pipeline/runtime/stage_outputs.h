#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "backend/common/status.h"
#include "pipeline/runtime/stage.h"

namespace farandole::pipeline {

// What an asynchronous functional collective returns stands for a tensor: takes a copy, which waits for that.
void awaitCollective(at::Tensor& tensor);

// Whether the last of them is a packet.
bool endsWithPacket(const std::vector<TensorMeta>& metas);

// Whether what a stage's module has returned for a microbatch can be handed over: dense tensors on the stage's device,
// as many as go to others, of the shapes that were declared, or that the slot has from steps before. A slot whose
// outputs are not known gets their metas.
Status checkOutputs(const StageSpec& spec, at::Device device, MicrobatchSlot& slot, std::vector<at::Tensor>& outputs);

}  // namespace farandole::pipeline
