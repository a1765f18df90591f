#pragma once

#include <cstdint>
#include <utility>

namespace farandole::pipeline::sparse {

// Counts batches of a window of gradient accumulation: gradients are zeroed before its first backward, and the
// optimizer steps after its last one. Only batches that were trained count.
class AccumulationWindow {
 public:
  explicit AccumulationWindow(std::int64_t size) : size_(size) {}

  std::int64_t size() const { return size_; }
  std::int64_t filled() const { return filled_; }  // batches since the last step
  bool isFirst() const { return filled_ == 0; }
  bool isLast() const { return filled_ + 1 >= size_; }

  void add() { filled_ = isLast() ? 0 : filled_ + 1; }
  // Ends a window that is not full; the number of batches that were in it.
  std::int64_t close() { return std::exchange(filled_, 0); }

 private:
  std::int64_t size_;
  std::int64_t filled_ = 0;
};

}  // namespace farandole::pipeline::sparse
