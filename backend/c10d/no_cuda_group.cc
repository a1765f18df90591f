// In place of c10d/cuda, where the headers of NCCL and CUDA were not found, or torch was built without CUDA.
#include "backend/c10d/cuda_group.h"

namespace farandole::backend {

Result<std::shared_ptr<CudaGroup>> CudaGroup::make(const Setup&) {
  return Status::unavailable("this farandole was built without CUDA (FARANDOLE_CUDA)");
}

void CudaGroup::leaveAtExit() {}

}  // namespace farandole::backend
