#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace farandole::pipeline {

// What the calling thread allocates with operator new while this lives, and nothing has it paused, as far as it is this
// program's own code that asks for it: what libraries (torch, its autograd) allocate for themselves does not count. The
// program's operator new is replaced for that. One at a time on a thread.
class AllocationCount {
 public:
  AllocationCount();
  AllocationCount(const AllocationCount&) = delete;
  AllocationCount& operator=(const AllocationCount&) = delete;
  ~AllocationCount();

  std::int64_t ours() const { return ours_; }
  std::int64_t theirs() const { return theirs_; }
  // By the functions that asked.
  std::string places() const;

  // Of what the test itself does inside.
  class Pause {
   public:
    Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;
    ~Pause();

   private:
    bool before_;
  };

  // Called by operator new, with where it returns to.
  void note(const void* caller);

 private:
  std::int64_t ours_ = 0, theirs_ = 0;
  std::map<std::string, std::int64_t> places_;
};

}  // namespace farandole::pipeline
