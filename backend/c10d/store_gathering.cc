#include "backend/c10d/store_gathering.h"

#include <algorithm>
#include <thread>
#include <vector>

namespace farandole::backend {

using std::chrono::milliseconds;

Status StoreGathering::await(std::chrono::steady_clock::time_point deadline, const std::function<Status()>& health) {
  const std::string all = key_ + "/all";
  if (store_.add(key_ + "/here", 1) == size_) store_.set(all, std::vector<std::uint8_t>{1});
  const auto haveCome = [&] { return store_.check({all}); };
  for (milliseconds pause{1}; !haveCome(); pause = std::min(2 * pause, milliseconds(50))) {
    // Who knows that all have come may leave before the others do.
    if (Status gone = health(); !gone) return haveCome() ? Status::ok() : gone;
    if (std::chrono::steady_clock::now() >= deadline) {
      return Status::timeout(std::to_string(store_.add(key_ + "/here", 0)) + " of " + std::to_string(size_) +
                             " ranks have come in time");
    }
    std::this_thread::sleep_for(pause);
  }
  return Status::ok();
}

Result<bool> StoreGathering::agree(const std::string& mine, std::chrono::steady_clock::time_point deadline,
                                   const std::function<Status()>& health) {
  // Before this rank is counted as one that has come.
  const std::string said = key_ + "/said/" + mine;
  (void)store_.add(said, 1);
  FARANDOLE_RETURN_IF_ERROR(await(deadline, health));
  return store_.add(said, 0) == size_;
}

}  // namespace farandole::backend
