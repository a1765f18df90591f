#include "backend/c10d/profiled_range.h"

#include <utility>

namespace farandole::backend {

namespace {

const c10::DebugInfoBase* currentProfile() {
  return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
}

}  // namespace

ProfiledRange::ProfiledRange(at::StepCallbacks callbacks, const char* title, const std::vector<at::Tensor>& tensors)
    : recorded_(std::move(callbacks)), profile_(currentProfile()) {
  if (!recorded_.isActive()) return;
  recorded_._setAsync();
  const std::vector<c10::IValue> inputs(tensors.begin(), tensors.end());
  recorded_.before(title, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
}

void ProfiledRange::end() {
  if (std::this_thread::get_id() != thread_ || isEnded_ || currentProfile() != profile_) return;
  isEnded_ = true;
  recorded_.end();
}

ProfiledRange::~ProfiledRange() {
  end();
  if (isEnded_) return;
  // RecordFunction calls the observers all the same; the profiler's do nothing where no profile runs.
  std::shared_ptr<c10::ThreadLocalDebugInfo> current = c10::ThreadLocalDebugInfo::current();
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  recorded_.end();
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(current));
}

}  // namespace farandole::backend
