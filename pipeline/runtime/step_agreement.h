#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backend/common/status.h"

namespace farandole::pipeline {

// What one rank reports of a step that failed.
struct FailureReport {
  bool failed = false;
  std::int64_t timeNs = 0;  // system clock: orders what failed first on one host, about so between hosts
  std::string text;
};

// What all ranks of the pipeline agree on, by small collectives over its group.
// One thread. Throws what the backend throws: then the group itself is broken.
//
// Before a step: may it run, do shapes have to be learned, do all ranks run the
// same plan. That vote is posted and waited for only when the first message is
// posted, so that the first stage computes meanwhile. After a step: has any
// rank failed. Only then are texts exchanged.
class StepAgreement {
 public:
  struct Vote {
    bool refuse = false;  // this rank cannot run the step
    bool relearn = false;
    std::uint64_t digest = 0;  // of the plan
  };
  struct Outcome {
    bool refused = false;
    bool relearn = false;
    bool samePlan = true;
  };

  // `backend` may be null for a pipeline of one rank.
  StepAgreement(c10::intrusive_ptr<c10d::Backend> backend, int worldSize);

  void postVote(const Vote& vote);
  // Waits no longer than `patience` where that is not kNoTimeout.
  Outcome awaitVote(std::chrono::milliseconds patience = kNoTimeout);
  bool anyFailed(bool failed);
  std::vector<FailureReport> exchangeReports(const FailureReport& mine);

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
  int worldSize_;
  Vote vote_;
  std::vector<at::Tensor> voteTensor_, failedTensor_;
  c10::intrusive_ptr<c10d::Work> voteWork_;
};

// Takes part in the beginning of a step that this rank cannot even compile; all others then return the reason. Throws
// when they do not come to that step within `patience`; kNoTimeout: the group's timeout.
void refuseStep(const c10::intrusive_ptr<c10d::Backend>& backend, const std::string& reason,
                std::chrono::milliseconds patience = kNoTimeout);

// Of the system clock.
std::int64_t systemTimeNs();

// One text of all failures, first one first.
std::string describeFailures(std::vector<FailureReport> reports);

}  // namespace farandole::pipeline
