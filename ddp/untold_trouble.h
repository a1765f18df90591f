#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <thread>

namespace farandole::ddp {

// What this rank has found, from when it begins to wait for the others, who are to be told at the end of the round, to
// when they have been. Where they do not come nobody else knows why. So it warns, once, when the wait gets long, from a
// thread of its own, and is in the error where the wait fails.
class UntoldTrouble {
 public:
  // `trouble` names this rank; where it is empty nothing is to be told.
  explicit UntoldTrouble(std::string trouble, std::chrono::milliseconds patience = std::chrono::seconds(5));

  // Throws what the wait has failed with, with the trouble where there is one.
  [[noreturn]] void throwWith(const std::exception_ptr& failure) const;

 private:
  std::string trouble_;
  std::jthread notice_;
};

}  // namespace farandole::ddp
