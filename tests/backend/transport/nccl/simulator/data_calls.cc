#include "tests/backend/transport/nccl/simulator/data_calls.h"

#include <algorithm>
#include <utility>

namespace farandole::testing {
namespace {

constexpr std::size_t kMostCallsInAGroup = 2048;

}  // namespace

ncclResult_t DataCalls::groupStart() {
  ++group().depth;
  return ncclSuccess;
}

ncclResult_t DataCalls::groupEnd() {
  Lock lock(core_.mutex);
  if (group().depth == 0) {
    core_.violation("ncclGroupEnd", "no group was begun");
    return ncclInvalidUsage;
  }
  return endGroup(lock);
}

void DataCalls::failed(ncclResult_t result, bool atGroupEnd) {
  Lock lock(core_.mutex);
  if (group().depth == 0) return;
  group().error = result;
  if (atGroupEnd) (void)endGroup(lock);
}

ncclResult_t DataCalls::endGroup(Lock& lock) {
  if (--group().depth > 0) return ncclSuccess;
  const Group ended = std::exchange(group(), Group());
  const ncclResult_t result = ended.error != ncclSuccess ? ended.error : launch(lock, ended);
  for (const Group::Call& call : ended.calls) communicators_.leave(*call.communicator);
  return result;
}

ncclResult_t DataCalls::launch(Lock& lock, const Group& group) {
  if (group.calls.size() > kMostCallsInAGroup) {
    core_.violation("ncclGroupEnd", "more than 2048 calls in a group");
    return ncclInternalError;
  }
  const Launches launches = plan(group);
  for (const auto& [call, plan] : launches) {
    const int self = call.communicator->rank;
    if (plan->with(self, true).size() != plan->with(self, false).size()) return ncclInvalidUsage;
  }
  if (const ncclResult_t result = connect(lock, launches); result != ncclSuccess) return result;
  for (const auto& [call, plan] : launches) {
    if (!call.communicator->usable()) return ncclInternalError;
  }
  for (const auto& [call, plan] : launches) {
    if (call.stream->capture != nullptr) ++call.communicator->captured;
    streams_.put(*call.stream, std::make_shared<Kernel>(*call.communicator, plan));
  }
  core_.changed();
  return ncclSuccess;
}

DataCalls::Launches DataCalls::plan(const Group& group) {
  Launches launches;
  for (const Group::Call& call : group.calls) {
    auto found = std::find_if(launches.begin(), launches.end(),
                              [&](const auto& launch) { return launch.first.communicator == call.communicator; });
    if (found == launches.end()) found = launches.insert(found, {call, std::make_shared<KernelPlan>()});
    if (found->first.stream != call.stream) {
      core_.violation("ncclGroupEnd", "one communicator on different streams in one group");
    }
    if ((found->first.stream->capture != nullptr) != (launches[0].first.stream->capture != nullptr)) {
      core_.violation("ncclGroupEnd", "captured and other streams in one group");
    }
    if (const auto* const collective = std::get_if<CollectiveCall>(&call.what)) {
      found->second->collectives.push_back(*collective);
    } else {
      found->second->messages.push_back(std::get<MessageCall>(call.what));
    }
  }
  return launches;
}

ncclResult_t DataCalls::connect(Lock& lock, const Launches& launches) {
  std::vector<std::vector<Clique::Connection>> owed;
  for (const auto& [call, plan] : launches) {
    owed.push_back(call.communicator->clique->connect(call.communicator->rank, *plan));
  }
  if (!connectsBlock) return ncclSuccess;
  core_.changed();
  for (std::size_t i = 0; i < launches.size(); ++i) {
    const Communicator& communicator = *launches[i].first.communicator;
    const Clique& clique = *communicator.clique;
    const auto done = [&] {
      return std::all_of(owed[i].begin(), owed[i].end(), [&](const auto& side) { return clique.connected(side); });
    };
    const auto loss = [&]() -> std::optional<std::chrono::milliseconds> {
      for (const Clique::Connection& side : owed[i]) {
        if (!clique.connected(side) && !clique.reachable(side.receiving ? side.to : side.from)) return kLossNotice;
      }
      return std::nullopt;
    };
    if (const ncclResult_t result = communicators_.await(lock, communicator, done, loss); result != ncclSuccess) {
      return result;
    }
  }
  return ncclSuccess;
}

ncclResult_t DataCalls::check(Lock& lock, ncclComm_t handle, cudaStream_t stream, ncclDataType_t dtype,
                              const char* function, Group::Call& call) {
  const ncclResult_t found = communicators_.find(handle, function, call.communicator);
  if (found != ncclSuccess) return found;
  Communicator& communicator = *call.communicator;
  const Use use(communicators_, lock, communicator, function);
  if (communicator.freed()) return ncclInternalError;  // just now, by another thread
  if (communicator.state == Communicator::State::kFinalized) {
    core_.violation(function, "the communicator was finalized");
    return ncclInvalidArgument;
  }
  if (communicator.state == Communicator::State::kRevoked) return ncclInvalidUsage;
  if (const ncclResult_t result = communicators_.asyncError(communicator); result != ncclSuccess) return result;
  communicators_.checkDevice(communicator, function);
  if (elementSize(dtype) == 0) {
    core_.violation(function, "this dtype is not simulated");
    return ncclInvalidUsage;
  }
  call.stream = streams_.find(stream, ThreadState::of(core_).device, function);
  if (call.stream == nullptr) return ncclUnhandledCudaError;
  if (call.stream->device != communicator.device) core_.violation(function, "the stream is of another device");
  return ncclSuccess;
}

ncclResult_t DataCalls::issue(Lock& lock, ncclResult_t result, Group::Call call) {
  Group& open = group();
  if (open.depth == 0 && result != ncclSuccess) return result;
  ++open.depth;
  if (result == ncclSuccess) {
    const bool other = call.communicator->uses > 0 && call.communicator->user != std::this_thread::get_id();
    if (!other) call.communicator->user = std::this_thread::get_id();
    ++call.communicator->uses;
    open.calls.push_back(std::move(call));
  } else {
    open.error = result;
  }
  const ncclResult_t ended = endGroup(lock);
  return result != ncclSuccess ? result : ended;
}

ncclResult_t DataCalls::message(const MessageCall& what, ncclDataType_t dtype, ncclComm_t communicator,
                                cudaStream_t stream, const char* function) {
  Lock lock(core_.mutex);
  Group::Call call{nullptr, nullptr, what};
  ncclResult_t result = check(lock, communicator, stream, dtype, function, call);
  if (result == ncclSuccess) {
    if (what.peer < 0 || what.peer >= call.communicator->clique->size()) result = ncclInvalidArgument;
    if (what.bytes > 0 && what.buffer == nullptr) result = ncclInvalidArgument;
  }
  return issue(lock, result, std::move(call));
}

ncclResult_t DataCalls::send(const void* buffer, std::size_t count, ncclDataType_t dtype, int peer,
                             ncclComm_t communicator, cudaStream_t stream) {
  const MessageCall call{true, const_cast<void*>(buffer), count * elementSize(dtype), peer};
  return message(call, dtype, communicator, stream, "ncclSend");
}

ncclResult_t DataCalls::recv(void* buffer, std::size_t count, ncclDataType_t dtype, int peer, ncclComm_t communicator,
                             cudaStream_t stream) {
  return message({false, buffer, count * elementSize(dtype), peer}, dtype, communicator, stream, "ncclRecv");
}

ncclResult_t DataCalls::collective(CollectiveCall what, const ncclRedOp_t* op, ncclComm_t communicator,
                                   cudaStream_t stream, const char* function) {
  Lock lock(core_.mutex);
  Group::Call call{nullptr, nullptr, CollectiveCall()};
  ncclResult_t result = check(lock, communicator, stream, what.dtype, function, call);
  if (result == ncclSuccess) {
    const Communicator& on = *call.communicator;
    const bool rooted = what.kind == CollectiveCall::Kind::kBroadcast || what.kind == CollectiveCall::Kind::kReduce;
    const bool reads = what.kind != CollectiveCall::Kind::kBroadcast || what.root == on.rank;
    const bool writes = what.kind != CollectiveCall::Kind::kReduce || what.root == on.rank;
    if (rooted && (what.root < 0 || what.root >= on.clique->size())) result = ncclInvalidArgument;
    if (what.count > 0 && ((reads && what.send == nullptr) || (writes && what.receive == nullptr))) {
      result = ncclInvalidArgument;
    }
    if (op != nullptr && result == ncclSuccess) result = resources_.operatorOf(*op, what.dtype, on, function, what.op);
  }
  if (result == ncclSuccess && what.count == 0) return ncclSuccess;  // nothing, on all ranks
  call.what = what;
  return issue(lock, result, std::move(call));
}

ncclResult_t DataCalls::allReduce(const void* send, void* receive, std::size_t count, ncclDataType_t dtype,
                                  ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  return collective({CollectiveCall::Kind::kAllReduce, send, receive, count, dtype, {}, -1}, &op, communicator, stream,
                    "ncclAllReduce");
}

ncclResult_t DataCalls::broadcast(const void* send, void* receive, std::size_t count, ncclDataType_t dtype, int root,
                                  ncclComm_t communicator, cudaStream_t stream) {
  return collective({CollectiveCall::Kind::kBroadcast, send, receive, count, dtype, {}, root}, nullptr, communicator,
                    stream, "ncclBroadcast");
}

ncclResult_t DataCalls::reduce(const void* send, void* receive, std::size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                               int root, ncclComm_t communicator, cudaStream_t stream) {
  return collective({CollectiveCall::Kind::kReduce, send, receive, count, dtype, {}, root}, &op, communicator, stream,
                    "ncclReduce");
}

ncclResult_t DataCalls::allGather(const void* send, void* receive, std::size_t count, ncclDataType_t dtype,
                                  ncclComm_t communicator, cudaStream_t stream) {
  return collective({CollectiveCall::Kind::kAllGather, send, receive, count, dtype, {}, -1}, nullptr, communicator,
                    stream, "ncclAllGather");
}

ncclResult_t DataCalls::reduceScatter(const void* send, void* receive, std::size_t count, ncclDataType_t dtype,
                                      ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  return collective({CollectiveCall::Kind::kReduceScatter, send, receive, count, dtype, {}, -1}, &op, communicator,
                    stream, "ncclReduceScatter");
}

}  // namespace farandole::testing
