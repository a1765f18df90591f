#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "backend/transport/nccl/nccl_api.h"

namespace farandole::transport {

// A pool of the user's memory, as torch numbers it.
using MemoryPoolId = std::pair<std::uint64_t, std::uint64_t>;

// A piece of it, in bytes of one device.
struct MemorySegment {
  void* data;
  std::size_t bytes;
};

// The user's memory that one communicator knows, which NCCL then uses without a copy. Guarded by its owner, who has the
// communicator's turn. It need not be empty at the end: NCCL forgets what is registered with a communicator when that
// is aborted.
class RegisteredMemory {
 public:
  explicit RegisteredMemory(const NcclApi& nccl) : nccl_(nccl) {}

  // The pool consists of these segments from now on: what is not among them is taken back, what is new registered;
  // symmetric ones by all ranks together, in this order. After an error the pool has none of what was new.
  Status set(ncclComm_t communicator, MemoryPoolId pool, const std::vector<MemorySegment>& segments, bool isSymmetric);
  // kInvalidArgument: the pool is not registered.
  Status remove(ncclComm_t communicator, MemoryPoolId pool);
  // Before the communicator is closed. The first error.
  Status removeAll(ncclComm_t communicator);

 private:
  struct Registration {
    MemorySegment segment;
    bool isSymmetric;
    void* handle;  // null where NCCL does without
  };

  Result<Registration> add(ncclComm_t communicator, const MemorySegment& segment, bool isSymmetric);
  Status takeBack(ncclComm_t communicator, std::vector<Registration>& registrations);

  const NcclApi& nccl_;
  std::map<MemoryPoolId, std::vector<Registration>> pools_;
};

}  // namespace farandole::transport
