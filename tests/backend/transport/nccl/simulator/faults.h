#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace farandole::testing {

// Calls that are to fail. With the lock.
class Faults {
 public:
  // The `nth` call of `function` from now, counted from 1, of any device where `device` is negative.
  void add(const std::string& function, int nth, int code, int device) {
    planned_[function].push_back({nth, code, device});
  }
  // Counts a call; what it is to fail with.
  std::optional<int> take(const std::string& function, int device);

 private:
  struct Fault {
    int left, code, device;
  };
  std::map<std::string, std::vector<Fault>> planned_;
};

}  // namespace farandole::testing
