#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <thread>
#include <vector>

namespace farandole::backend {

// An operation as the profiler sees it: begun here, ended by whoever finds it done, if that is the thread that began it
// and its profile still runs. An end from anywhere else would write to the profile's events, which are freed as it
// stops; torch's own backends do so.
class ProfiledRange {
 public:
  ProfiledRange(at::StepCallbacks callbacks, const char* title, const std::vector<at::Tensor>& tensors);
  ~ProfiledRange();
  ProfiledRange(const ProfiledRange&) = delete;
  ProfiledRange& operator=(const ProfiledRange&) = delete;

  // Once; again, or from elsewhere, it does nothing. A range that nobody ends lasts as long as the one around it, which
  // is that of the call that began it.
  void end();

 private:
  at::RecordFunction recorded_;
  const std::thread::id thread_ = std::this_thread::get_id();
  // Held, so that no later profile has its address.
  const std::shared_ptr<c10::ThreadLocalDebugInfo> context_ = c10::ThreadLocalDebugInfo::current();
  const c10::DebugInfoBase* const profile_;
  bool isEnded_ = false;
};

}  // namespace farandole::backend
