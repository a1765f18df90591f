#pragma once

#include <string>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Seconds that the messages of one edge take, with a stage's output and with its gradient.
struct EdgeTransfer {
  StageEdge edge;
  double activation = 0;
  double gradient = 0;
};

// How long messages between ranks are on their way. A number stands for one that is the same for all.
struct TransferTimes {
  TransferTimes(double all = 0) : other(all) {}  // NOLINT(google-explicit-constructor): a number is one
  TransferTimes(double other, std::vector<EdgeTransfer> edges) : other(other), edges(std::move(edges)) {}

  double of(const StageEdge& edge, bool isGradient) const;
  bool areZero() const;

  double other = 0;                 // over edges that are not named
  std::vector<EdgeTransfer> edges;  // by their ends, ascending
};

// That all are finite numbers of at least 0, and edges in their order.
Status checkTransfers(const TransferTimes& times);

// "0.5 ms", "0.5 to 2 ms": of the messages of a plan that pass between ranks; empty where none does.
std::string describeTransfers(const TransferTimes& times, const Plan& plan);

}  // namespace farandole::pipeline
