#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "backend/common/status.h"

namespace farandole::python {

// Planning errors are misuse: ValueError.
template <typename T>
T valueOf(Result<T> result) {
  if (!result) throw pybind11::value_error(std::string(result.status().toString()));
  return std::move(result).value();
}

}  // namespace farandole::python
