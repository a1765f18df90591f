#include "backend/c10d/cuda/nccl_reductions.h"

#include <nccl.h>

#include "backend/c10d/reduce_kernels.h"

namespace farandole::backend {
namespace {

using ::c10d::ReduceOp;

const char* nameOf(const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM: return "SUM";
    case ReduceOp::AVG: return "AVG";
    case ReduceOp::PRODUCT: return "PRODUCT";
    case ReduceOp::MIN: return "MIN";
    case ReduceOp::MAX: return "MAX";
    case ReduceOp::BAND: return "BAND";
    case ReduceOp::BOR: return "BOR";
    case ReduceOp::BXOR: return "BXOR";
    case ReduceOp::PREMUL_SUM: return "PREMUL_SUM";
    default: return "an unknown operation";
  }
}

std::optional<ncclDataType_t> elementOfNccl(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
    case at::kByte: return ncclUint8;
    case at::kChar: return ncclInt8;
    case at::kInt: return ncclInt32;
    case at::kUInt32: return ncclUint32;
    case at::kLong: return ncclInt64;
    case at::kUInt64: return ncclUint64;
    case at::kHalf:
    case at::kComplexHalf: return ncclFloat16;
    case at::kBFloat16: return ncclBfloat16;
    case at::kFloat:
    case at::kComplexFloat: return ncclFloat32;
    case at::kDouble:
    case at::kComplexDouble: return ncclFloat64;
    case at::kFloat8_e4m3fn: return ncclFloat8e4m3;
    case at::kFloat8_e5m2: return ncclFloat8e5m2;
    default: return std::nullopt;
  }
}

std::optional<ncclRedOp_t> operationOfNccl(const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM:
    case ReduceOp::PREMUL_SUM: return ncclSum;
    case ReduceOp::AVG: return ncclAvg;
    case ReduceOp::PRODUCT: return ncclProd;
    case ReduceOp::MIN: return ncclMin;
    case ReduceOp::MAX: return ncclMax;
    default: return std::nullopt;
  }
}

}  // namespace

NcclReduction ncclReductionFor(const char* operation, const ReduceOp& reduction, at::ScalarType type) {
  const char* const name = nameOf(reduction);
  auto op = operationOfNccl(reduction);
  TORCH_CHECK_VALUE(op, operation, ": ", name,
                    " is not among the reductions of NCCL, which tensors on CUDA go by; expected SUM, AVG, PRODUCT, "
                    "MIN, MAX or PREMUL_SUM, or tensors on CPU");
  const auto dtype = elementOfNccl(type);
  TORCH_CHECK_VALUE(dtype, operation, ": tensors on CUDA have dtype ", type,
                    ", which NCCL does not reduce; expected another dtype, or tensors on CPU");
  const bool isComplex = at::isComplexType(type);
  const bool isBool = type == at::kBool;
  const bool isSum = *op == ncclSum || *op == ncclAvg;
  TORCH_CHECK_VALUE(!isComplex || isSum, operation, ": ", name, " of ", type,
                    " on CUDA; expected SUM or AVG, complex numbers are reduced as pairs of real ones");
  const auto factor = premulFactor(reduction);
  TORCH_CHECK_VALUE(!isBool || (*op != ncclAvg && !factor), operation, ": ", name,
                    " of bool; expected SUM, PRODUCT, MIN or MAX");
  const bool takesFactor =
      *dtype == ncclFloat16 || *dtype == ncclBfloat16 || *dtype == ncclFloat32 || *dtype == ncclFloat64;
  TORCH_CHECK_VALUE(!factor || (takesFactor && !isComplex), operation, ": PREMUL_SUM of ", type,
                    " on CUDA; expected half, bfloat16, float or double");
  if (isBool && *op == ncclSum) op = ncclMax;
  if (isBool && *op == ncclProd) op = ncclMin;
  NcclReduction found{*dtype, at::elementSize(type) / (isComplex ? 2 : 1), *op, std::nullopt};
  if (factor) found.factor = factor->toDouble();
  return found;
}

}  // namespace farandole::backend
