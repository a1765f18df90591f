#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/transport/nccl/device_runtime.h"

namespace farandole::transport {

struct CommunicatorSpec {
  std::string name;  // in NCCL's log and in errors
  ncclUniqueId id;   // the same on all ranks
  int rank;
  int size;
  int device;
  int maxCtas = 0;  // how many of the device's processors it may take; 0: as NCCL thinks
};

// Memory of a device that NCCL has allocated, in bytes.
struct NcclMemoryUse {
  std::uint64_t suspendable = 0;  // what ncclCommSuspend would free
  std::uint64_t persistent = 0;
  std::uint64_t total = 0;
  bool isSuspended = false;
};

// One of NCCL's communicators. It is blocking: of a non-blocking one every group of calls starts a thread (NCCL 2.30,
// group.cc), which costs more than the call. What may block the host for long is therefore done where that harms
// nobody: connecting on a thread of its own, closing too.
//
// Any thread; the calls of several take turns. abort() comes through while another one is blocked in a call.
class NcclCommunicator {
 public:
  // Waits on the host until all ranks have come.
  static Result<std::shared_ptr<NcclCommunicator>> connect(const DeviceRuntime& runtime, const CommunicatorSpec& spec);
  class Turn;
  // Of a communicator's ranks all but the excluded ones, in their order: only those call, each with its turn. Waits on
  // the host for them; the end of the communicator that they come from ends that.
  static Result<std::shared_ptr<NcclCommunicator>> shrink(const DeviceRuntime& runtime, const std::string& name,
                                                          const NcclCommunicator& from, const Turn& turn,
                                                          std::vector<int> excluded);
  // Aborts what was not closed.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // The right to call NCCL with this communicator, for as long as it lives; empty once it was aborted or closed.
  class Turn {
   public:
    explicit Turn(NcclCommunicator& communicator);
    // Empty, too, while somebody else has it.
    Turn(NcclCommunicator& communicator, std::try_to_lock_t tryOnly);
    ncclComm_t handle() const { return handle_; }

   private:
    std::unique_lock<std::mutex> lock_;
    ncclComm_t handle_;
  };

  // What NCCL's own threads have found since: ok, or why this communicator is broken.
  Status asyncError();
  // Adds what it has allocated; nothing once it has ended. kUnavailable where NCCL does not tell.
  Status addMemoryUse(NcclMemoryUse& use);
  // Ends what runs on the device, without its result, and every call; peers stay where they are. interrupt() is what
  // of it can be done without waiting: for all communicators of a group first, since a call may be stuck in several.
  void interrupt();
  void abort();
  // Waits on the host until the device is done with it and the peers have what was sent.
  Status close();
  // The same on a thread of its own, for one that is captured in graphs: NCCL waits until they are gone, and nobody can
  // call that off.
  std::future<Status> closeAside();

  // Something of it was captured in a graph.
  void noteCaptured() { isCaptured_ = true; }
  bool isCaptured() const { return isCaptured_; }

  const std::string& name() const { return *name_; }
  int device() const { return device_; }
  Status ended() const;
  bool isAborted() const { return isAborted_; }
  // Nothing is left of it at NCCL, or soon will not be: it was closed, or its abort has come so far.
  bool isFreed() const { return handle_ == nullptr; }

 private:
  // NCCL keeps the pointer to its name (2.28 to 2.30): the text stays where it is.
  using Name = std::shared_ptr<const std::string>;
  NcclCommunicator(const DeviceRuntime& runtime, Name name, int device, ncclComm_t handle);

  const DeviceRuntime& runtime_;
  const Name name_;
  const int device_;
  std::mutex turn_;                 // held during calls
  std::mutex ending_;               // of what ends it, and of asyncError; taken after turn_
  std::atomic<ncclComm_t> handle_;  // null once it has ended
  std::atomic<bool> isAborted_{false};
  std::atomic<bool> isClosing_{false};
  std::atomic<bool> isCaptured_{false};
};

// Group calls of NCCL's: everything between becomes one launch for each communicator.
class NcclGroup {
 public:
  // NCCL takes 2048; an exchange between two ranks is two.
  static constexpr int kMostCalls = 1024;

  explicit NcclGroup(const NcclApi& nccl);
  // Ends the group if nobody has.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // Notes the first that fails.
  void add(ncclResult_t result, const char* what);
  // Ends the group and begins another one, where all ranks that have a part in it do so, for NCCL takes 2048 calls in a
  // group at most.
  void cut();
  // Whether calls still go into a group: not after one that failed to be launched.
  bool isOpen() const { return isOpen_; }
  // What failed, of the calls or of their launch.
  Status end();

 private:
  void begin();

  const NcclApi& nccl_;
  Status status_;
  bool isOpen_ = false;
};

}  // namespace farandole::transport
