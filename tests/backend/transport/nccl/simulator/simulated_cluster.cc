#include "tests/backend/transport/nccl/simulator/simulated_cluster.h"

#include <cstdio>
#include <cstdlib>

#include "tests/backend/transport/nccl/simulator/capture.h"
#include "tests/backend/transport/nccl/simulator/function_tables.h"
#include "tests/backend/transport/nccl/simulator/simulation.h"

namespace farandole::testing {

SimulatedCluster::SimulatedCluster(int numDevices, std::uint64_t seed)
    : simulation_(std::make_shared<Simulation>(numDevices, seed)) {
  if (Simulation::current() != nullptr) {
    std::fputs("a second SimulatedCluster at a time\n", stderr);
    std::abort();
  }
  Simulation::setCurrent(simulation_);
  executor_ = std::thread([simulation = simulation_] { simulation->streams.runUntilEnd(); });
}

SimulatedCluster::~SimulatedCluster() {
  Simulation::setCurrent(nullptr);
  {
    const std::lock_guard lock(simulation_->core.mutex);
    simulation_->core.ended = true;
    simulation_->core.changed();
  }
  executor_.join();
}

transport::NcclApi SimulatedCluster::nccl() const { return simulatedNccl(simulation_->nccl.newer); }

transport::CudaApi SimulatedCluster::cuda() const { return simulatedCuda(); }

void SimulatedCluster::setNewerFunctions(bool present) { simulation_->nccl.newer = present; }

void SimulatedCluster::setConnectsBlock(bool block) {
  const std::lock_guard lock(simulation_->core.mutex);
  simulation_->nccl.connectsBlock = block;
}

void SimulatedCluster::setGraphsStay(bool stay) {
  const std::lock_guard lock(simulation_->core.mutex);
  simulation_->nccl.graphsStay = stay;
  simulation_->core.changed();
}

cudaStream_t SimulatedCluster::userStream(int device) {
  const std::lock_guard lock(simulation_->core.mutex);
  return simulation_->streams.create(device, Stream::Kind::kUsers)->handle();
}

Stream* SimulatedCluster::find(cudaStream_t handle, const char* function) const {
  return simulation_->streams.find(handle, ThreadState::of(simulation_->core).device, function);
}

void SimulatedCluster::enqueue(cudaStream_t handle, std::function<void()> function) {
  const std::lock_guard lock(simulation_->core.mutex);
  Stream* const stream = find(handle, "enqueue");
  if (stream != nullptr) simulation_->streams.put(*stream, std::make_shared<FunctionWork>(std::move(function)));
}

bool SimulatedCluster::synchronize(cudaStream_t handle, std::chrono::milliseconds limit) {
  Lock lock(simulation_->core.mutex);
  Stream* const stream = find(handle, "cudaStreamSynchronize");
  if (stream == nullptr) return false;
  return simulation_->core.hosts.wait_for(lock, limit, [stream] { return stream->queue.empty(); });
}

void SimulatedCluster::hold(cudaStream_t handle) {
  const std::lock_guard lock(simulation_->core.mutex);
  Stream* const stream = find(handle, "hold");
  if (stream == nullptr) return;
  stream->holds.push_back(std::make_shared<HoldWork>());
  simulation_->streams.put(*stream, stream->holds.back());
}

void SimulatedCluster::release(cudaStream_t handle) {
  const std::lock_guard lock(simulation_->core.mutex);
  Stream* const stream = find(handle, "release");
  if (stream == nullptr || stream->holds.empty()) return;
  stream->holds.front()->release();
  stream->holds.pop_front();
  simulation_->core.changed();
}

void SimulatedCluster::beginCapture(cudaStream_t handle) {
  const std::lock_guard lock(simulation_->core.mutex);
  Stream* const stream = find(handle, "cudaStreamBeginCapture");
  if (stream != nullptr) farandole::testing::beginCapture(simulation_->core, *stream);
}

void SimulatedCluster::endCapture(cudaStream_t handle) {
  const std::lock_guard lock(simulation_->core.mutex);
  Stream* const stream = find(handle, "cudaStreamEndCapture");
  if (stream != nullptr) farandole::testing::endCapture(simulation_->core, simulation_->streams, *stream);
}

void SimulatedCluster::replay(cudaStream_t handle, cudaStream_t into) {
  const std::lock_guard lock(simulation_->core.mutex);
  Stream* const stream = find(handle, "cudaGraphLaunch");
  Stream* const target = into == nullptr ? stream : find(into, "cudaGraphLaunch");
  if (stream == nullptr || target == nullptr) return;
  if (stream->graph == nullptr || !stream->graph->ended || target->capture != nullptr) {
    return simulation_->core.violation("cudaGraphLaunch", "no graph was captured, or the stream is being captured");
  }
  Replay::launch(simulation_->streams, *target, *stream->graph);
}

void SimulatedCluster::failNccl(const std::string& function, int nth, ncclResult_t code, int device) {
  const std::lock_guard lock(simulation_->core.mutex);
  simulation_->faults.add(function, nth, code, device);
}

void SimulatedCluster::failCuda(const std::string& function, int nth, cudaError_t code, int device) {
  const std::lock_guard lock(simulation_->core.mutex);
  simulation_->faults.add(function, nth, code, device);
}

void SimulatedCluster::failAsync(int device, ncclResult_t code) {
  const std::lock_guard lock(simulation_->core.mutex);
  simulation_->communicators.failAll(device, code);
}

void SimulatedCluster::killRank(int device) {
  const std::lock_guard lock(simulation_->core.mutex);
  simulation_->core.killed.at(static_cast<std::size_t>(device)) = Clock::now();
  simulation_->core.changed();
}

bool SimulatedCluster::waitUntilBlocked(int calls, std::chrono::milliseconds limit) const {
  Lock lock(simulation_->core.mutex);
  return simulation_->core.hosts.wait_for(lock, limit, [&] { return simulation_->core.blocked >= calls; });
}

std::vector<std::string> SimulatedCluster::violations() const {
  const std::lock_guard lock(simulation_->core.mutex);
  return simulation_->core.violations;
}

SimulatedCluster::CommunicatorInfo SimulatedCluster::info(ncclComm_t handle) const {
  const std::lock_guard lock(simulation_->core.mutex);
  const Communicator* const found = simulation_->communicators.lookUp(handle);
  if (found == nullptr || found->freed() || found->clique == nullptr) return {};
  return {found->name, found->rank, found->clique->size(), found->device, found->maxCtas};
}

SimulatedCluster::Live SimulatedCluster::live() const {
  const std::lock_guard lock(simulation_->core.mutex);
  const Simulation& all = *simulation_;
  return {all.streams.countCreated(), all.cuda.countEvents(),        all.communicators.countLive(),
          all.nccl.countOperators(),  all.nccl.countRegistrations(), all.nccl.countAllocations()};
}

std::vector<Call> SimulatedCluster::calls() const {
  const std::lock_guard lock(simulation_->core.mutex);
  return simulation_->journal.calls;
}

std::map<std::string, int> SimulatedCluster::callCounts() const {
  const std::lock_guard lock(simulation_->core.mutex);
  return simulation_->journal.counts;
}

}  // namespace farandole::testing
