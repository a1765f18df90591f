#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "backend/c10d/batch_member_work.h"
#include "backend/p2p/batch_plan.h"

namespace farandole::backend {

// One entry of a batch: a tensor to send to `peer` or to receive from it.
struct BatchEntry {
  p2p::Direction direction;
  at::Tensor tensor;
  int peer;
  int tag;
  std::uint64_t key = 0;  // of the member that c10d was given for it, where somebody is told of its end
};

// Operations between startCoalescing and endCoalescing, of one thread.
struct Batch {
  std::uint64_t number;  // among those of its group
  std::vector<BatchEntry> entries;
  std::vector<c10::intrusive_ptr<::c10d::Work>> collectives;
  std::shared_ptr<WorkOfBatch> work;
  std::exception_ptr refusal = nullptr;  // of the first operation that is wrong

  // By who has caught it. The end of the batch throws it: c10d, which has begun the batch in its own books, would go on
  // noting the group's later collectives there, for good and without calling them, if anybody threw before that.
  void noteRefusal() {
    if (refusal == nullptr) refusal = std::current_exception();
  }
};

// The batch that is open on a group, if there is one. It may be outlived by the works of its members, and outlive the
// group. Any thread.
class OpenBatch : public std::enable_shared_from_this<OpenBatch> {
 public:
  // Throws while another thread has one open; one of this thread that was never ended is dropped.
  void open();
  // This thread's, or null.
  Batch* find();
  // This thread's, which is open no more; throws when there is none.
  Batch take();
  // The batch of this number, if it is still open.
  void drop(std::uint64_t number);

 private:
  std::mutex mutex_;
  std::optional<Batch> batch_;
  std::uint64_t numOpened_ = 0;
  std::thread::id thread_;
  std::atomic<bool> isOpen_{false};
};

// Who is refused within a batch leaves it by the exception, and will not end it: then this drops it.
class LeavingByError {
 public:
  explicit LeavingByError(OpenBatch& batches) : batches_(batches), numBefore_(std::uncaught_exceptions()) {}
  ~LeavingByError() {
    if (std::uncaught_exceptions() == numBefore_) return;
    if (const Batch* const batch = batches_.find()) batches_.drop(batch->number);
  }
  LeavingByError(const LeavingByError&) = delete;
  LeavingByError& operator=(const LeavingByError&) = delete;

 private:
  OpenBatch& batches_;
  const int numBefore_;
};

}  // namespace farandole::backend
