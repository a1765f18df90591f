#pragma once

#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

namespace farandole::ddp {

// What a communication hook, or the future that it returned, has failed with.
struct HookFailure : std::exception {
  HookFailure(int bucket, std::exception_ptr cause) : bucket(bucket), cause(std::move(cause)) {}

  const char* what() const noexcept override { return "a communication hook failed"; }
  // For people: the bucket, and the first line of the cause.
  std::string describe() const;

  int bucket;
  std::exception_ptr cause;
};

// After a failure of a hook for this bucket: whether all ranks of the group have failed for it, as often, within some
// seconds. Else the collectives of these ranks are out of step. Only who fails asks, by the group's store, so that
// other rounds say nothing.
bool haveAllFailed(c10d::ProcessGroup& group, int bucket);

}  // namespace farandole::ddp
