#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace farandole::ddp {

// Giving a group up. A rank that fails between two collectives is out of step
// with the others from then on, who would wait for it until the group's timeout.
// So it says why in the group's store, then aborts the group. Any thread.
//
// Who waits learns of it where the backend's abort ends the waits of the other
// ranks (farandole's). Gloo has no abort: await() looks into the
// store meanwhile. Over other backends a rank may wait for the group's timeout,
// and then learns the reason.

// `why` names the rank. The first rank to give the group up is the one that is heard.
void abandonGroup(c10d::ProcessGroup& group, const std::string& why);

// Why the group was given up; empty when it was not, or when its store cannot tell. Never throws.
std::string abandonmentOf(c10d::ProcessGroup& group);

// Once abandonmentOf() has told: what this rank has under way on a device would never end over a backend whose abort is
// of one rank alone (torch's NCCL), and whatever comes after it on its stream, so it is aborted here, too.
void leaveAbandoned(c10d::ProcessGroup& group, c10::DeviceType device);

// Waits for a collective on tensors of this device. Throws what it throws, or, when
// gloo's is waited for in vain, an error that says that the group was abandoned.
void await(c10d::ProcessGroup& group, c10::DeviceType device, c10d::Work& work);
// So for what has come of a communication hook: looks, and leaves the rest of the wait to the caller.
void await(c10d::ProcessGroup& group, c10::DeviceType device, c10::ivalue::Future& future);

}  // namespace farandole::ddp
