#include "pipeline/runtime/executor_config.h"

#include <c10/util/Exception.h>

namespace farandole::pipeline {

std::string describeCurrentError() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

void warn(const std::string& text) { TORCH_WARN(text); }

}  // namespace farandole::pipeline
