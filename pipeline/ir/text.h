#pragma once

#include <string>
#include <string_view>

#include "backend/common/status.h"
#include "pipeline/ir/action.h"

namespace farandole::pipeline {

// The text of torch.distributed.pipelining's _Action: "2F0", "3SEND_F1",
// "0UNSHARD", "(0F1;3B0)OVERLAP_F_B"; and ours: "0WAIT_SEND1",
// "(0SEND_F1;0RECV_B0)BATCH_P2P", and "2SEND_F1>5" to, "5RECV_F1<2" from a stage
// that is not the chain's neighbour.
std::string toString(const Action& action);

// "SEND_F" and so on.
std::string_view toString(ActionKind kind);

// The inverse. Surrounding spaces are allowed; anything else that toString()
// does not write is an error that quotes the text.
Result<Action> parseAction(std::string_view text);

}  // namespace farandole::pipeline
