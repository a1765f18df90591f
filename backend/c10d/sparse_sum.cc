#include "backend/c10d/sparse_sum.h"

#include "backend/c10d/tensor_checks.h"

namespace farandole::backend {
namespace {

// A rank's row: dtype, sparse dimensions, dense dimensions, number of values, sizes.
constexpr std::int64_t kMaxDims = 28;
constexpr std::int64_t kHeader = 4;
constexpr std::int64_t kRow = kHeader + kMaxDims;

at::Tensor describeShape(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.dim() <= kMaxDims, "all_reduce: a sparse tensor has ", tensor.dim(),
                    " dimensions; expected at most ", kMaxDims);
  at::Tensor row = at::zeros({kRow}, at::kLong);
  auto* const at = row.mutable_data_ptr<std::int64_t>();
  at[0] = static_cast<std::int64_t>(tensor.scalar_type());
  at[1] = tensor.sparse_dim();
  at[2] = tensor.dense_dim();
  at[3] = tensor._nnz();
  for (std::int64_t i = 0; i < tensor.dim(); ++i) at[kHeader + i] = tensor.size(i);
  return row;
}

std::string shapeText(const std::int64_t* row) {
  const auto dims = row[1] + row[2];
  return c10::str(static_cast<at::ScalarType>(row[0]), " ", at::IntArrayRef(row + kHeader, dims), " with ", row[1],
                  " sparse dimensions");
}

// The dtype that values are added in.
at::ScalarType sumType(at::ScalarType dtype) { return at::isReducedFloatingType(dtype) ? at::kFloat : dtype; }

}  // namespace

SparseSum::SparseSum(at::Tensor tensor, int rank, int size, std::function<std::string(int)> nameOf)
    : tensor_(std::move(tensor)),
      mine_(tensor_.detach().coalesce()),
      rank_(rank),
      size_(size),
      nameOf_(std::move(nameOf)),
      shape_(describeShape(mine_)),
      shapesOfAll_(at::empty({size, kRow}, at::kLong)) {}

void SparseSum::gatherShapes(CollectiveCalls& calls) const {
  calls.allGather(sliceOf(shape_), equalSlices(shapesOfAll_, size_), Layout::kFlat);
}

std::int64_t SparseSum::checkShape(int rank) const {
  const auto* const mine = shapesOfAll_.const_data_ptr<std::int64_t>() + kRow * rank_;
  const auto* const theirs = shapesOfAll_.const_data_ptr<std::int64_t>() + kRow * rank;
  bool isSame = true;
  for (std::int64_t i = 0; i < kRow; ++i) isSame = isSame && (i == 3 || mine[i] == theirs[i]);
  TORCH_CHECK_VALUE(isSame, "all_reduce: ", nameOf_(rank), " has a sparse tensor ", shapeText(theirs), "; expected ",
                    shapeText(mine), " as on ", nameOf_(rank_));
  return theirs[3];
}

void SparseSum::prepareValues() {
  indices_ = mine_.indices().contiguous();
  values_ = mine_.values().contiguous();
  for (int rank = 0; rank < size_; ++rank) {
    const std::int64_t count = checkShape(rank);
    std::vector<std::int64_t> sizes = values_.sizes().vec();
    sizes[0] = count;
    indicesOfAll_.push_back(at::empty({indices_.size(0), count}, indices_.options()));
    valuesOfAll_.push_back(at::empty(sizes, values_.options()));
  }
}

void SparseSum::gatherValues(CollectiveCalls& calls) const {
  calls.allGather(sliceOf(indices_), slicesOf(indicesOfAll_), Layout::kList);
  calls.allGather(sliceOf(values_), slicesOf(valuesOfAll_), Layout::kList);
}

std::vector<at::Tensor> SparseSum::valueTensors() const {
  std::vector<at::Tensor> all{indices_, values_};
  all.insert(all.end(), indicesOfAll_.begin(), indicesOfAll_.end());
  all.insert(all.end(), valuesOfAll_.begin(), valuesOfAll_.end());
  return all;
}

void SparseSum::addUp() const {
  const at::NoGradGuard noGrad;
  const at::Tensor values = at::cat(valuesOfAll_).to(sumType(tensor_.scalar_type()));
  const at::Tensor all = at::_sparse_coo_tensor_unsafe(at::cat(indicesOfAll_, 1), values, tensor_.sizes());
  tensor_.copy_(all.coalesce().to(tensor_.scalar_type()));
}

}  // namespace farandole::backend
