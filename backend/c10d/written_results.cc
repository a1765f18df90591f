#include "backend/c10d/written_results.h"

namespace farandole::backend {
namespace {

bool isCopiedByGloo(::c10d::OpType type) {
  switch (type) {
    case ::c10d::OpType::ALLREDUCE_COALESCED:
    case ::c10d::OpType::ALLGATHER:
    case ::c10d::OpType::_ALLGATHER_BASE:
    case ::c10d::OpType::ALLGATHER_COALESCED:
    case ::c10d::OpType::GATHER:
    case ::c10d::OpType::REDUCE_SCATTER:
    case ::c10d::OpType::_REDUCE_SCATTER_BASE: return true;
    default: return false;
  }
}

}  // namespace

void markWritten(::c10d::OpType type, const std::vector<at::Tensor>& results) {
  if (!isCopiedByGloo(type)) return;
  for (const at::Tensor& tensor : results) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace farandole::backend
