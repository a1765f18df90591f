#include "backend/c10d/sparse_all_reduce.h"

#include "backend/c10d/callback_threads.h"
#include "backend/c10d/process_group.h"
#include "backend/c10d/reduce_kernels.h"
#include "backend/c10d/tensor_checks.h"

namespace farandole::backend {

using collective::Program;

namespace {

// A rank's row: dtype, sparse dimensions, dense dimensions, number of values, sizes.
constexpr std::int64_t kMaxDims = 28;
constexpr std::int64_t kHeader = 4;
constexpr std::int64_t kRow = kHeader + kMaxDims;

at::Tensor describeShape(const at::Tensor& tensor) {
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

WorkPtr ProcessGroupFarandole::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "all_reduce: tensors has ", tensors.size(), " tensors; expected one");
  const at::Tensor& tensor = tensors[0];
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kSparse && tensor.device().is_cpu(),
                    "all_reduce of a sparse tensor: expected a COO tensor on cpu");
  TORCH_CHECK_VALUE(opts.reduceOp.op_ == ::c10d::ReduceOp::SUM,
                    "all_reduce: the operation on a sparse tensor is not SUM; expected SUM, the only one that leaves "
                    "it sparse");
  TORCH_CHECK_VALUE(tensor.dim() <= kMaxDims, "all_reduce: a sparse tensor has ", tensor.dim(),
                    " dimensions; expected at most ", kMaxDims);
  (void)reductionFor(opts.reduceOp, tensor.scalar_type());
  auto shapes = makeCollective(::c10d::OpType::_ALLREDUCE_SPARSE, "farandole:all_reduce_sparse", opts.timeout);
  auto values = makeCollective(::c10d::OpType::_ALLREDUCE_SPARSE, "farandole:all_reduce_sparse", opts.timeout);
  auto work = c10::make_intrusive<SparseAllReduceWork>(tensor, topology(), std::move(shapes), std::move(values));
  work->launch();
  if (Batch* batch = openBatchOfThisThread()) batch->collectives.push_back(work);
  return work;
}

SparseAllReduceWork::SparseAllReduceWork(at::Tensor tensor, collective::Topology topology,
                                         c10::intrusive_ptr<CollectiveWork> shapes,
                                         c10::intrusive_ptr<CollectiveWork> values)
    : Work(topology.rank, ::c10d::OpType::_ALLREDUCE_SPARSE),
      tensor_(std::move(tensor)),
      mine_(tensor_.detach().coalesce()),
      topology_(topology),
      shapes_(std::move(shapes)),
      values_(std::move(values)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

void SparseAllReduceWork::launch() {
  const at::Tensor row = describeShape(mine_);
  shapesOfAll_ = at::empty({topology_.size, kRow}, at::kLong);
  Program program;
  collective::allGather(program, topology_, sliceOf(row), equalSlices(shapesOfAll_, topology_.size));
  shapes_->setTensors({}, {row, shapesOfAll_});
  shapes_->setProgram(std::move(program), static_cast<std::uint32_t>(shapes_->getSequencenumber()));
  shapes_->launch();
  shapes_->whenDone([work = self()] { runOnCallbackThread([work] { work->afterShapes(); }); });
}

void SparseAllReduceWork::afterShapes() {
  bool isStarter = false;
  std::call_once(shapesDone_, [&] {
    isStarter = true;
    error_ = shapes_->exception();
    if (error_ != nullptr) return;
    try {
      startValues();
    } catch (...) {
      error_ = std::current_exception();
    }
  });
  // Callbacks run outside of what only one thread may do: they may wait for this work.
  if (!hasValues_) {
    end();
  } else if (isStarter) {
    values_->whenDone([work = self()] { runOnCallbackThread([work] { work->afterValues(); }); });
  }
}

std::int64_t SparseAllReduceWork::checkShape(int rank) const {
  const auto* const mine = shapesOfAll_.const_data_ptr<std::int64_t>() + kRow * topology_.rank;
  const auto* const theirs = shapesOfAll_.const_data_ptr<std::int64_t>() + kRow * rank;
  bool isSame = true;
  for (std::int64_t i = 0; i < kRow; ++i) isSame = isSame && (i == 3 || mine[i] == theirs[i]);
  TORCH_CHECK_VALUE(isSame, "all_reduce: rank ", rank, " has a sparse tensor ", shapeText(theirs), "; expected ",
                    shapeText(mine), " as on rank ", topology_.rank);
  return theirs[3];
}

void SparseAllReduceWork::startValues() {
  const at::Tensor indices = mine_.indices().contiguous();
  const at::Tensor values = mine_.values().contiguous();
  for (int rank = 0; rank < topology_.size; ++rank) {
    const std::int64_t count = checkShape(rank);
    std::vector<std::int64_t> sizes = values.sizes().vec();
    sizes[0] = count;
    indicesOfAll_.push_back(at::empty({indices.size(0), count}, indices.options()));
    valuesOfAll_.push_back(at::empty(sizes, values.options()));
  }
  Program program;
  collective::allGather(program, topology_, sliceOf(indices), slicesOf(indicesOfAll_));
  collective::allGather(program, topology_, sliceOf(values), slicesOf(valuesOfAll_));
  Tensors kept{indices, values};
  kept.insert(kept.end(), indicesOfAll_.begin(), indicesOfAll_.end());
  kept.insert(kept.end(), valuesOfAll_.begin(), valuesOfAll_.end());
  values_->setTensors({}, std::move(kept));
  values_->setProgram(std::move(program), static_cast<std::uint32_t>(values_->getSequencenumber()));
  values_->launch();
  hasValues_ = true;
}

void SparseAllReduceWork::afterValues() {
  std::call_once(valuesDone_, [&] {
    error_ = values_->exception();
    if (error_ != nullptr) return;
    try {
      addUp();
    } catch (...) {
      error_ = std::current_exception();
    }
  });
  end();
}

void SparseAllReduceWork::addUp() {
  const at::NoGradGuard noGrad;
  const at::Tensor values = at::cat(valuesOfAll_).to(sumType(tensor_.scalar_type()));
  const at::Tensor all = at::_sparse_coo_tensor_unsafe(at::cat(indicesOfAll_, 1), values, tensor_.sizes());
  tensor_.copy_(all.coalesce().to(tensor_.scalar_type()));
}

void SparseAllReduceWork::end() {
  if (isDone_.exchange(true)) return;
  if (error_ != nullptr) {
    future_->setError(error_);
  } else {
    future_->markCompleted(c10::IValue(result()));
  }
}

bool SparseAllReduceWork::wait(milliseconds timeout) {
  try {
    shapes_->wait(timeout);
    afterShapes();
    if (hasValues_) values_->wait(timeout);
  } catch (const std::exception&) {
    // The round's error is this one's, found below.
  }
  if (hasValues_) {
    afterValues();
  } else {
    afterShapes();
  }
  if (error_ != nullptr) std::rethrow_exception(error_);
  return true;
}

void SparseAllReduceWork::abort() {
  shapes_->abort();
  if (hasValues_) values_->abort();
}

}  // namespace farandole::backend
