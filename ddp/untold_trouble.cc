#include "ddp/untold_trouble.h"

#include <c10/util/Exception.h>

#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <utility>

namespace farandole::ddp {
namespace {

void warnAfter(const std::stop_token& stop, const std::string& trouble, std::chrono::milliseconds patience) {
  std::mutex mutex;
  std::condition_variable_any never;
  std::unique_lock lock(mutex);
  never.wait_for(lock, stop, patience, [] { return false; });
  if (stop.stop_requested()) return;
  TORCH_WARN("farandole.ddp: ", trouble, "\nThis rank has waited for ", static_cast<double>(patience.count()) / 1e3,
             " s for the others to come to the end of their backward, where they are told; it waits on.");
}

}  // namespace

UntoldTrouble::UntoldTrouble(std::string trouble, std::chrono::milliseconds patience) : trouble_(std::move(trouble)) {
  if (trouble_.empty()) return;
  notice_ = std::jthread([text = trouble_, patience](const std::stop_token& stop) { warnAfter(stop, text, patience); });
}

void UntoldTrouble::throwWith(const std::exception_ptr& failure) const {
  if (trouble_.empty()) std::rethrow_exception(failure);
  std::string why = "what it threw says nothing";
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {  // NOLINT(bugprone-empty-catch): `why` is said
  }
  TORCH_CHECK(false, "farandole.ddp: ", trouble_,
              "\nThe other ranks could not be told: the wait for them failed: ", why);
}

}  // namespace farandole::ddp
