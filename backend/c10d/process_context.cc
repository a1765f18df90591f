#include "backend/c10d/process_context.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

#include "backend/transport/ucx/ucx_transport.h"

namespace farandole::backend {
namespace {

std::mutex currentMutex;
std::weak_ptr<ProcessContext>& current() {
  static auto* const context = new std::weak_ptr<ProcessContext>;  // outlives static destructors
  return *context;
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
  auto transport = transport::UcxTransport::create();
  if (!transport) return transport.status();
  std::shared_ptr<ProcessContext> context(new ProcessContext, [](ProcessContext* gone) {
    if (gone->isOurs()) destroy(gone, gone->loop_.inLoop());  // else leaked: it is the parent's
  });
  context->connections_ = std::make_unique<transport::Connections>(std::move(transport).value(), context->loop_);
  current() = context;
  return context;
}

ProcessContext::ProcessContext() : pid_(getpid()), loop_("farandole") {}

ProcessContext::~ProcessContext() { loop_.stop(); }

bool ProcessContext::isOurs() const { return getpid() == pid_; }

Result<std::uint32_t> ProcessContext::takeGroupNumber() {
  std::lock_guard lock(mutex_);
  const auto free = std::find(groupNumbers_.begin(), groupNumbers_.end(), false);
  const auto number = static_cast<std::uint32_t>(free - groupNumbers_.begin());
  if (free != groupNumbers_.end()) {
    *free = true;
  } else if (number < p2p::kMaxGroups) {
    groupNumbers_.push_back(true);
  } else {
    return Status::unavailable("this process has " + std::to_string(p2p::kMaxGroups) +
                               " groups already: destroy those that are no longer used");
  }
  return number;
}

void ProcessContext::returnGroupNumber(std::uint32_t number) {
  std::lock_guard lock(mutex_);
  groupNumbers_[number] = false;
}

}  // namespace farandole::backend
