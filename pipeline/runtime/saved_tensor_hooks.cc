#include "pipeline/runtime/saved_tensor_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/record_function.h>

#include <memory>

namespace farandole::pipeline {

namespace {

thread_local std::vector<std::uint64_t>* noted = nullptr;

// Called when an operation begins, before it makes its node.
std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& operation) {
  if (noted == nullptr || operation.seqNr() < 0) return nullptr;
  if (at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return nullptr;
  const auto number = static_cast<std::uint64_t>(operation.seqNr());
  if (noted->empty() || noted->back() < number) noted->push_back(number);
  return nullptr;
}

}  // namespace

SavedTensorHookWatch::SavedTensorHookWatch(std::vector<std::uint64_t>& hookedOps) {
  hookedOps.clear();
  noted = &hookedOps;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(note).scopes({at::RecordScope::FUNCTION}));
}

SavedTensorHookWatch::~SavedTensorHookWatch() {
  at::removeCallback(handle_);
  noted = nullptr;
}

}  // namespace farandole::pipeline
