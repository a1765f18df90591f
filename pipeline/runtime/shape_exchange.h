#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/runtime/tensor_meta.h"

namespace farandole::pipeline {

// How stages learn shapes. In a step that learns, every activation is preceded
// by a header of fixed size with the dtypes and shapes of its tensors; later
// steps send none, until the inputs change. A poisoned header says that the
// sender failed: no tensors follow, and no gradient is to be sent back.
inline constexpr std::int64_t kHeaderLength = 256;  // int64 elements

at::Tensor emptyHeader();
at::Tensor poisonedHeader();
Result<at::Tensor> encodeHeader(const std::vector<TensorMeta>& metas);

// No value when the header is poisoned.
Result<std::optional<std::vector<TensorMeta>>> decodeHeader(const at::Tensor& header);

// `given`, without its packets, has the number, dtypes and sizes that the user declared; else an
// error that names which tensors ("inputs", "outputs") and both lists.
Status checkDeclared(std::string_view which, const std::vector<TensorMeta>& declared,
                     const std::vector<TensorMeta>& given);

}  // namespace farandole::pipeline
