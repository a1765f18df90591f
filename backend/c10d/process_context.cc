#include "backend/c10d/process_context.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>

#include "backend/c10d/callback_threads.h"
#include "backend/c10d/cuda_group.h"
#include "backend/c10d/cuda_transport.h"
#include "backend/collective/buffer_pool.h"
#include "backend/common/settings.h"
#include "backend/transport/shm/shm_transport.h"
#include "backend/transport/ucx/ucx_transport.h"

namespace farandole::backend {
namespace {

// torch gives its flight recorder 15 s to write its dump with stack traces, and goes on without.
constexpr std::chrono::seconds kAbortHooksAtExit{30};
constexpr std::uint64_t kMostScratch = std::uint64_t{1} << 40;

std::mutex currentMutex;
std::weak_ptr<ProcessContext>& current() {
  static auto* const context = new std::weak_ptr<ProcessContext>;  // outlives static destructors
  return *context;
}

Result<std::unique_ptr<transport::RoutingTransport>> openTransports() {
  const auto choice = choiceSetting("FARANDOLE_TRANSPORT", "auto", {"auto", "shm", "ucx"});
  if (!choice) return choice.status();
  const auto unexpected = transport::unexpectedBytesSetting();
  if (!unexpected) return unexpected.status();
  std::unique_ptr<transport::Transport> local;
  if (*choice != "ucx") {
    const auto options = transport::ShmOptions::fromEnvironment();
    if (!options) return options.status();
    auto shm = transport::ShmTransport::create(*options);
    if (!shm) return shm.status();
    local = std::move(shm).value();
  }
  if (*choice == "shm") {
    return transport::RoutingTransport::create(std::move(local), []() -> Result<std::unique_ptr<transport::Transport>> {
      return Status::invalidArgument(
          "FARANDOLE_TRANSPORT is 'shm'; expected 'auto' or 'ucx', some ranks are on other hosts");
    });
  }
  return transport::RoutingTransport::create(std::move(local), [unexpected = *unexpected] {
    return transport::UcxTransport::create(transport::UcxMemory::kHost, unexpected);
  });
}

// The last group may be let go of by an operation that completes on the loop,
// which cannot end itself.
void destroy(ProcessContext* context, bool inLoop) {
  if (inLoop) {
    std::thread([context] { delete context; }).detach();
  } else {
    delete context;
  }
}

}  // namespace

Result<std::shared_ptr<ProcessContext>> ProcessContext::acquire() {
  std::lock_guard lock(currentMutex);
  if (auto context = current().lock(); context != nullptr && context->isOurs()) return context;
  [[maybe_unused]] static const int registered = std::atexit(&ProcessContext::leaveAtExit);
  const auto scratch = byteSetting("FARANDOLE_SCRATCH_BYTES", collective::BufferPool::kKeptBytes, 0, kMostScratch);
  if (!scratch) return scratch.status();
  collective::BufferPool::instance().keepUpTo(*scratch);
  auto transport = openTransports();
  if (!transport) return transport.status();
  try {
    auto context = make(std::move(transport).value());
    current() = context;
    return context;
  } catch (const std::exception& error) {  // for want of descriptors, or of threads
    return Status::unavailable(std::string("the process's event loop: ") + error.what());
  }
}

std::shared_ptr<ProcessContext> ProcessContext::make(std::unique_ptr<transport::RoutingTransport> transport) {
  std::shared_ptr<ProcessContext> context(new ProcessContext, [](ProcessContext* gone) {
    if (gone->isOurs()) destroy(gone, gone->loop_.inLoop());  // else leaked: it is the parent's
  });
  context->routing_ = transport.get();
  if (context->routing_->hasLocal()) context->hostIdentity_ = transport::hostIdentity();
  context->connections_ = std::make_unique<transport::Connections>(std::move(transport), context->loop_);
  return context;
}

// A process may exit without destroying its groups: its peers shall not take that for its death.
void ProcessContext::leaveAtExit() {
  std::shared_ptr<ProcessContext> context;
  {
    std::lock_guard lock(currentMutex);
    context = current().lock();
  }
  if (context == nullptr || !context->isOurs()) return;
  CudaGroup::leaveAtExit();
  CudaTransport::leaveAtExit();
  {
    transport::ProgressEngine::Access access(context->connections().engine());
    access.transport().leave();
  }
  std::unique_ptr<net::ControlPlane> control;
  {
    std::lock_guard lock(context->controlMutex_);
    control = std::move(context->control_);
  }
  if (control != nullptr) control->leaveAllGroups();
  control.reset();
  // What the others' leaving would end must not call back into a process that is being torn down.
  context->loop_.stop();
  waitBeforeExit(kAbortHooksAtExit);
}

ProcessContext::ProcessContext() : forks_(ForkCount::now()), loop_("farandole") { ForkCount::begin(); }

ProcessContext::~ProcessContext() {
  control_.reset();
  loop_.stop();
}

Result<std::string> ProcessContext::networkAddress() {
  transport::ProgressEngine::Access access(connections_->engine());
  return routing_->networkAddress();
}

Result<std::string> ProcessContext::controlAddress() {
  std::lock_guard lock(controlMutex_);
  if (control_ == nullptr) {
    auto control = net::ControlPlane::listen(loop_);
    if (!control) return control.status();
    control_ = std::move(control).value();
  }
  return control_->address();
}

Status ProcessContext::useControlPlane(const std::function<Status(net::ControlPlane&)>& use) {
  std::lock_guard lock(controlMutex_);
  return control_ != nullptr ? use(*control_) : Status::unavailable("there is no control plane");
}

void ProcessContext::addGroup(const void* world, const std::shared_ptr<collective::Communicator>& group) {
  std::lock_guard lock(mutex_);
  groups_.push_back({world, group});
}

void ProcessContext::removeGroup(const std::shared_ptr<collective::Communicator>& group) {
  std::lock_guard lock(mutex_);
  // Compared by owner: a group that is locked here might end here, which needs the mutex.
  std::erase_if(groups_, [&](const KnownGroup& known) {
    const bool isIt = !known.group.owner_before(group) && !group.owner_before(known.group);
    return isIt || known.group.expired();
  });
}

std::vector<collective::Communicator::Gone> ProcessContext::goneFrom(const void* world) {
  std::vector<std::shared_ptr<collective::Communicator>> groups;
  {
    std::lock_guard lock(mutex_);
    for (const KnownGroup& known : groups_) {
      if (known.world == world) groups.push_back(known.group.lock());
    }
  }
  std::vector<collective::Communicator::Gone> all;
  for (const auto& group : groups) {
    if (group == nullptr) continue;
    for (auto& gone : group->gone()) all.push_back(std::move(gone));
  }
  return all;
}

Result<std::uint32_t> ProcessContext::takeGroupNumber() {
  const Result<std::uint32_t> number = chooseGroupNumber();
  if (number) {
    transport::ProgressEngine::Access access(connections_->engine());
    access.transport().openGroup(*number);
  }
  return number;
}

Result<std::uint32_t> ProcessContext::chooseGroupNumber() {
  std::lock_guard lock(mutex_);
  if (groupNumbers_.all()) {
    return Status::unavailable("this process has " + std::to_string(p2p::kMaxGroups) +
                               " groups already: destroy those that are no longer used");
  }
  // Not the one that has just come back: what was sent to a group that is gone would be taken for the new one's.
  while (groupNumbers_[nextGroupNumber_]) nextGroupNumber_ = (nextGroupNumber_ + 1) % p2p::kMaxGroups;
  const std::uint32_t number = nextGroupNumber_;
  groupNumbers_[number] = true;
  nextGroupNumber_ = (number + 1) % p2p::kMaxGroups;
  return number;
}

void ProcessContext::returnGroupNumber(std::uint32_t number) {
  std::lock_guard lock(mutex_);
  groupNumbers_[number] = false;
}

}  // namespace farandole::backend
