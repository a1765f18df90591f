#pragma once

#include <random>
#include <string>

#include "pipeline/ir/channel_model.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// What a rank waits for before it computes.
enum class Host {
  kTakesInputs,   // what it computes with
  kSynchronizes,  // all that it has posted: as where CUDA loads a kernel, frees memory or is synchronized
};

// An oracle for validate(): executes a lowered plan one random event after
// another, moving labelled payloads through modelled channels, until nothing
// can happen any more. Returns an empty text when every rank ended, every
// message arrived where it belongs and everything was computed once and from
// the right inputs; else what went wrong.
std::string runRandomly(const Plan& plan, ChannelModel model, std::mt19937_64& random, Host host = Host::kTakesInputs);

}  // namespace farandole::pipeline
