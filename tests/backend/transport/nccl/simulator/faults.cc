#include "tests/backend/transport/nccl/simulator/faults.h"

#include <algorithm>

namespace farandole::testing {

std::optional<int> Faults::take(const std::string& function, int device) {
  const auto found = planned_.find(function);
  if (found == planned_.end()) return std::nullopt;
  std::optional<int> code;
  for (Fault& fault : found->second) {
    if (fault.device >= 0 && fault.device != device) continue;
    if (--fault.left == 0) code = fault.code;
  }
  auto& faults = found->second;
  faults.erase(std::remove_if(faults.begin(), faults.end(), [](const Fault& fault) { return fault.left <= 0; }),
               faults.end());
  return code;
}

}  // namespace farandole::testing
