// In place of c10d/cuda, where the headers of NCCL and CUDA were not found, or torch was built without CUDA.
#include "backend/c10d/cuda_group.h"
#include "backend/c10d/cuda_transport.h"

namespace farandole::backend {
namespace {

Status noCuda() { return Status::unavailable("this farandole was built without CUDA (FARANDOLE_CUDA)"); }

}  // namespace

Result<std::shared_ptr<CudaGroup>> CudaGroup::make(const Setup&) { return noCuda(); }

Result<std::shared_ptr<c10::Allocator>> CudaGroup::allocator() { return noCuda(); }

Reducing CudaGroup::reducing(const char*, const ::c10d::ReduceOp& op, at::ScalarType dtype) { return {op, dtype, {}}; }

std::map<int, std::vector<CudaSegment>> CudaGroup::segmentsOf(CudaPoolId) { return {}; }

void CudaGroup::leaveAtExit() {}

Result<std::shared_ptr<CudaTransport>> CudaTransport::acquire() { return noCuda(); }

void CudaTransport::leaveAtExit() {}

}  // namespace farandole::backend
