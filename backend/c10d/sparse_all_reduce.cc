#include "backend/c10d/sparse_all_reduce.h"

#include "backend/c10d/callback_threads.h"
#include "backend/c10d/joint_work.h"
#include "backend/c10d/process_group.h"
#include "backend/c10d/program_calls.h"
#include "backend/c10d/reduce_kernels.h"

namespace farandole::backend {

using collective::Program;

namespace {

constexpr ::c10d::OpType kType = ::c10d::OpType::_ALLREDUCE_SPARSE;
constexpr const char* kTitle = "farandole:all_reduce_sparse";

// Throws when it is not done; what it failed for is the sum's error.
void awaitRound(CollectiveWork& round, const WaitLimit& limit) {
  try {
    round.wait(limit.left());
  } catch (const std::exception&) {
    if (!round.isDone()) throw;
  }
}

// Of a part of it, whose end nobody is told of.
WorkOptions unheard(WorkOptions options) {
  options.onDone = {};
  options.key = 0;
  return options;
}

}  // namespace

WorkPtr ProcessGroupFarandole::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "all_reduce: tensors has ", tensors.size(), " tensors; expected one");
  const at::Tensor& tensor = tensors[0];
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kSparse && (tensor.is_cpu() || tensor.is_cuda()),
                    "all_reduce of a sparse tensor: expected a COO tensor on cpu or cuda");
  TORCH_CHECK_VALUE(opts.reduceOp.op_ == ::c10d::ReduceOp::SUM,
                    "all_reduce: the operation on a sparse tensor is not SUM; expected SUM, the only one that leaves "
                    "it sparse");
  (void)reductionFor(opts.reduceOp, tensor.scalar_type());
  SparseSum sum(tensor, rank_, size_, [group = communicator_](int rank) { return group->nameOf(rank); });
  WorkPtr work;
  if (tensor.is_cuda()) {
    work = sumOnCuda(std::move(sum), opts);
  } else {
    const WorkOptions options = workOptions(kType, kTitle, opts.timeout);
    auto shapes = c10::make_intrusive<CollectiveWork>(communicator_, unheard(options));
    auto values = c10::make_intrusive<CollectiveWork>(communicator_, unheard(workOptions(kType, kTitle, opts.timeout)));
    auto sparse = c10::make_intrusive<SparseAllReduceWork>(options, std::move(sum), topology(), std::move(shapes),
                                                           std::move(values));
    sparse->launch();
    work = std::move(sparse);
  }
  if (Batch* const batch = openBatch_->find()) batch->collectives.push_back(work);
  return work;
}

WorkPtr ProcessGroupFarandole::sumOnCuda(SparseSum sum, const ::c10d::AllreduceOptions& opts) {
  // The calls of NCCL must come in the order of the program, on all ranks: the host waits for the shapes here, as it
  // has for coalescing. All else is in order on the current stream.
  const WorkOptions options = workOptions(kType, kTitle, opts.timeout);
  const auto started = std::chrono::steady_clock::now();
  const at::Device device = sum.tensor().device();
  CudaGroup* group = nullptr;
  try {
    auto shapes = c10::make_intrusive<CollectiveWork>(communicator_, unheard(options));
    shapes->setTensors({}, sum.shapeTensors());
    Program program;
    ProgramCalls calls(program, topology());
    sum.gatherShapes(calls);
    shapes->setProgram(std::move(program), static_cast<std::uint32_t>(options.sequence));
    shapes->launch();
    shapes->wait();
    sum.prepareValues();
    group = &cuda();
    group->run(unheard(workOptions(kType, kTitle, opts.timeout)), device, false, {}, sum.valueTensors(),
               [&](CollectiveCalls& into) { sum.gatherValues(into); });
    sum.addUp();
  } catch (...) {
    if (options.onDone) {
      options.onDone({kType, options.sequence, {}, false, started, std::chrono::steady_clock::now()});
    }
    throw;
  }
  // No calls: its end is that of the addition, and of the whole.
  WorkOptions last = workOptions(kType, kTitle, opts.timeout);
  last.onDone = options.onDone;
  last.key = options.key;
  return group->run(last, device, false, {sum.tensor()}, {}, [](CollectiveCalls&) {});
}

SparseAllReduceWork::SparseAllReduceWork(WorkOptions options, SparseSum sum, const collective::Topology& topology,
                                         c10::intrusive_ptr<CollectiveWork> shapes,
                                         c10::intrusive_ptr<CollectiveWork> values)
    : Work(topology.rank, kType),
      options_(std::move(options)),
      sum_(std::move(sum)),
      topology_(topology),
      shapes_(std::move(shapes)),
      values_(std::move(values)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
      futureResult_(c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get())) {}

void SparseAllReduceWork::launch() {
  Program program;
  ProgramCalls calls(program, topology_);
  sum_.gatherShapes(calls);
  shapes_->setTensors({}, sum_.shapeTensors());
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

void SparseAllReduceWork::startValues() {
  sum_.prepareValues();
  Program program;
  // When the shapes have come, a rank may have called more of the group: a turn in the host's segment would be another
  // one on each. Messages are told apart by this work's number, which is as old as the call.
  const collective::Topology messagesOnly{topology_.rank, topology_.size};
  ProgramCalls calls(program, messagesOnly);
  sum_.gatherValues(calls);
  values_->setTensors({}, sum_.valueTensors());
  values_->continueWith(std::move(program), static_cast<std::uint32_t>(values_->getSequencenumber()));
  values_->launch();
  hasValues_ = true;
}

void SparseAllReduceWork::afterValues() {
  std::call_once(valuesDone_, [&] {
    error_ = values_->exception();
    if (error_ != nullptr) return;
    try {
      sum_.addUp();
    } catch (...) {
      error_ = std::current_exception();
    }
  });
  end();
}

::c10d::WorkResult SparseAllReduceWork::workResult() const {
  if (error_ == nullptr) return ::c10d::WorkResult::SUCCESS;
  if (shapes_->exception() != nullptr) return resultOf(shapes_->status());
  // Neither round's, or the values': it was given other ranks' shapes that do not fit, say.
  return hasValues_ && values_->exception() != nullptr ? resultOf(values_->status()) : ::c10d::WorkResult::UNKNOWN;
}

void SparseAllReduceWork::end() {
  if (isDone_.exchange(true)) return;
  const auto finished = std::chrono::steady_clock::now();
  if (options_.onDone) duration_ = std::chrono::duration<float, std::milli>(finished - started_).count();
  futureResult_->markCompleted(static_cast<std::int64_t>(workResult()));
  if (error_ != nullptr) {
    future_->setError(error_);
  } else {
    future_->markCompleted(c10::IValue(result()));
  }
  if (!options_.onDone) return;
  options_.onDone({kType, options_.sequence, {options_.key}, error_ == nullptr, started_, finished});
}

float SparseAllReduceWork::getDuration() const {
  const float duration = duration_;
  checkDuration(kType, duration);
  return duration;
}

bool SparseAllReduceWork::wait(milliseconds timeout) {
  const WaitLimit limit(timeout);
  awaitRound(*shapes_, limit);
  afterShapes();
  if (hasValues_) {
    awaitRound(*values_, limit);
    afterValues();
  }
  future_->wait();  // another thread may be about to complete it
  if (error_ != nullptr) std::rethrow_exception(error_);
  return true;
}

void SparseAllReduceWork::abort() {
  shapes_->abort();
  if (hasValues_) values_->abort();
}

}  // namespace farandole::backend
