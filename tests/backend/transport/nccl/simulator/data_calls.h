#pragma once

#include <nccl.h>

#include "tests/backend/transport/nccl/simulator/communicator.h"
#include "tests/backend/transport/nccl/simulator/resources.h"
#include "tests/backend/transport/nccl/simulator/streams.h"
#include "tests/backend/transport/nccl/simulator/thread_state.h"

namespace farandole::testing {

// NCCL's calls that put kernels into streams, alone or in groups: a method for each member of NcclApi.
class DataCalls {
 public:
  DataCalls(Core& core, Streams& streams, Communicators& communicators, Resources& resources)
      : core_(core), streams_(streams), communicators_(communicators), resources_(resources) {}

  ncclResult_t groupStart();
  ncclResult_t groupEnd();
  ncclResult_t send(const void* buffer, std::size_t count, ncclDataType_t dtype, int peer, ncclComm_t communicator,
                    cudaStream_t stream);
  ncclResult_t recv(void* buffer, std::size_t count, ncclDataType_t dtype, int peer, ncclComm_t communicator,
                    cudaStream_t stream);
  ncclResult_t allReduce(const void* send, void* receive, std::size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                         ncclComm_t communicator, cudaStream_t stream);
  ncclResult_t broadcast(const void* send, void* receive, std::size_t count, ncclDataType_t dtype, int root,
                         ncclComm_t communicator, cudaStream_t stream);
  ncclResult_t reduce(const void* send, void* receive, std::size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                      int root, ncclComm_t communicator, cudaStream_t stream);
  ncclResult_t allGather(const void* send, void* receive, std::size_t count, ncclDataType_t dtype,
                         ncclComm_t communicator, cudaStream_t stream);
  ncclResult_t reduceScatter(const void* send, void* receive, std::size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                             ncclComm_t communicator, cudaStream_t stream);

  // A call of this thread failed before it came here; when that ended the outermost group, the group is dropped.
  void failed(ncclResult_t result, bool atGroupEnd);

  bool connectsBlock = false;  // with the lock

 private:
  using Launches = std::vector<std::pair<Group::Call, std::shared_ptr<KernelPlan>>>;

  Group& group() { return ThreadState::of(core_).group; }
  ncclResult_t collective(CollectiveCall call, const ncclRedOp_t* op, ncclComm_t communicator, cudaStream_t stream,
                          const char* function);
  ncclResult_t message(const MessageCall& call, ncclDataType_t dtype, ncclComm_t communicator, cudaStream_t stream,
                       const char* function);
  // Puts the call into the thread's group, or makes one of it alone. Null stream: a call that failed with `result`.
  ncclResult_t issue(Lock& lock, ncclResult_t result, Group::Call call);
  ncclResult_t check(Lock& lock, ncclComm_t handle, cudaStream_t stream, ncclDataType_t dtype, const char* function,
                     Group::Call& call);
  ncclResult_t endGroup(Lock& lock);
  ncclResult_t launch(Lock& lock, const Group& group);
  Launches plan(const Group& group);
  ncclResult_t connect(Lock& lock, const Launches& launches);

  Core& core_;
  Streams& streams_;
  Communicators& communicators_;
  Resources& resources_;
};

}  // namespace farandole::testing
