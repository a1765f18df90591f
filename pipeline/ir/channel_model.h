#pragma once

#include <cstdint>
#include <string_view>

namespace farandole::pipeline {

// In what order a transport completes messages. A send is always a rendezvous:
// it completes once its receive is posted, never by being buffered.
enum class ChannelModel : std::uint8_t {
  kTagged,           // each message by itself: UCX, gloo
  kFifoPerEdge,      // per pair of sender and receiver in the order of posting: NCCL, a communicator per directed edge
  kOneQueuePerRank,  // a rank's posts start one after another, a batch as one: NCCL, one communicator and stream
};

constexpr std::string_view toString(ChannelModel model) {
  switch (model) {
    case ChannelModel::kTagged: return "kTagged";
    case ChannelModel::kFifoPerEdge: return "kFifoPerEdge";
    case ChannelModel::kOneQueuePerRank: return "kOneQueuePerRank";
  }
  return "?";
}

}  // namespace farandole::pipeline
