#pragma once

#include <cstdint>
#include <vector>

namespace farandole::pipeline {

// What one step of a plan does. The names and the text form are those of
// torch.distributed.pipelining (_ComputationType); WAIT_SEND and BATCH_P2P are ours.
enum class ActionKind : std::uint8_t {
  kForward,         // F
  kBackward,        // B, gradients of inputs and weights
  kBackwardInput,   // I
  kBackwardWeight,  // W
  kSendF,           // SEND_F, posts the send of the stage's output to a stage that takes it
  kRecvF,           // RECV_F, posts the receive of the stage's input from a stage that makes it
  kSendB,           // SEND_B, posts the send of the gradient of the stage's input
  kRecvB,           // RECV_B, posts the receive of the gradient of the stage's output
  kWaitSend,        // WAIT_SEND, waits for all that the stage sent for the microbatch
  kUnshard,         // UNSHARD
  kReshard,         // RESHARD
  kReduceGrad,      // REDUCE_GRAD
  kOverlapFB,       // (F;B)OVERLAP_F_B
  kBatchP2p,        // (sends and receives with one peer)BATCH_P2P, posted together
  kWaitSendF,       // WAIT_SEND_F, waits for all SEND_F of the stage for the microbatch
  kWaitSendB,       // WAIT_SEND_B, waits for all SEND_B of the stage for the microbatch
  kWaitReduceGrad,  // WAIT_REDUCE_GRAD
};

inline constexpr std::int32_t kNoMicrobatch = -1;
inline constexpr std::int32_t kNoStage = -1;  // of kOverlapFB and kBatchP2p: their parts name the stages
inline constexpr std::int32_t kNeighbour = -1;

// One step of one rank. Sends and receives only post: the compute action that
// consumes a received tensor waits for it, WAIT_SEND or the end of the step
// waits for a send.
struct Action {
  std::int32_t stage = 0;
  ActionKind kind = ActionKind::kForward;
  std::int32_t microbatch = kNoMicrobatch;
  std::vector<Action> parts;  // of kOverlapFB and kBatchP2p, else empty
  // Of a send or receive: the stage at the other end. The chain's neighbour, the next one's for SEND_F and RECV_B, is
  // never named by its number.
  std::int32_t other = kNeighbour;

  bool operator==(const Action&) const = default;
};

}  // namespace farandole::pipeline
