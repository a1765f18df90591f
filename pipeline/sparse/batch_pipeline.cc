#include "pipeline/sparse/batch_pipeline.h"

#include <cxxabi.h>

#include <ctime>
#include <utility>

namespace farandole::pipeline::sparse {

namespace {

using Clock = std::chrono::steady_clock;

double secondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double threadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <typename Call>
std::exception_ptr caught(Call&& call) {
  try {
    call();
  } catch (const abi::__forced_unwind&) {  // the thread is ended from outside
    throw;
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

BatchPipeline::BatchPipeline(std::shared_ptr<BatchStages> stages, const BatchPipelineOptions& options)
    : stages_(std::move(stages)),
      options_(options),
      depth_(options.hasDist ? 3 : 2),
      threads_(options.loadThread, options.hasDist ? options.distThread : ThreadUse::kNever) {
  setExecutesAllBatches(options.executeAllBatches);
}

BatchPipeline::~BatchPipeline() = default;

void BatchPipeline::join() {
  const auto interrupts = [this] { stages_->checkInterrupts(); };
  if (distIsBeside_) distThread_.join(interrupts);
  distIsBeside_ = false;
  if (loadIsBeside_) loadThread_.join(interrupts);
  loadIsBeside_ = false;
  for (const Slot& slot : slots_) sourceEnded_ = sourceEnded_ || slot.isEnd;
}

// Time in which the thread did not compute counts as blocked. Its clock is a system call.
void BatchPipeline::timed(double& blocked, const std::function<void()>& call) {
  if (!threads_.isTiming()) return call();
  const auto start = Clock::now();
  const double computed = threadSeconds();
  call();
  blocked += secondsSince(start) - (threadSeconds() - computed);
}

BatchPipeline::Slot& BatchPipeline::newSlot() {
  Slot& slot = slots_.emplace_back();
  slot.batch = next_++;
  return slot;
}

void BatchPipeline::load(Slot& slot) {
  slot.error = caught([&] { slot.isEnd = stages_->load(slot.batch) == Loaded::kEndOfData; });
}

void BatchPipeline::startDist(Slot& slot) {
  slot.hasStarted = true;
  if (!options_.hasDist) return;
  const auto presence = slot.error ? Presence::kFailed : slot.isEnd ? Presence::kEndOfData : Presence::kBatch;
  const auto error = caught([&] { stages_->startDist(slot.batch, presence); });
  if (!slot.error) slot.error = error;
}

void BatchPipeline::finishDist(Slot& slot) {
  slot.hasFinished = true;
  if (!options_.hasDist) return;
  const auto error = caught([&] { slot.isEnd = stages_->finishDist(slot.batch) == Exchanged::kEndOfData; });
  if (!slot.error) slot.error = error;
}

void BatchPipeline::completeDist(Slot& slot) {
  slot.hasCompleted = true;
  if (!options_.hasDist || slot.isEnd || slot.error) return;
  slot.error = caught([&] { stages_->completeDist(slot.batch); });
}

void BatchPipeline::distBeside(Slot& slot) {
  startDist(slot);
  finishDist(slot);
  completeDist(slot);
}

bool BatchPipeline::wantsMore(std::size_t most) const { return !sourceEnded_ && slots_.size() < most; }

void BatchPipeline::loadHere() {
  Slot& slot = newSlot();
  load(slot);
  if (slot.isEnd) sourceEnded_ = true;
}

void BatchPipeline::exchangeFirst() {
  Slot& first = slots_.front();
  if (!first.hasStarted) startDist(first);
  if (!first.hasFinished) finishDist(first);
  if (!first.hasCompleted && options_.completesAhead) completeDist(first);
}

// What torchrec's fill_pipeline does: batch i and its input_dist, then batch i+1.
void BatchPipeline::fill() {
  if (slots_.empty() && wantsMore(depth_)) loadHere();
  if (slots_.empty()) return;
  exchangeFirst();
  while (!slots_.front().isEnd && slots_.size() + 1 < depth_ && wantsMore(depth_)) loadHere();
}

// Where all batches of a step must be there before it: on all ranks or on none.
bool BatchPipeline::fillAndAgree() {
  while (wantsMore(depth_)) loadHere();
  if (!slots_.empty() && slots_.back().isEnd) slots_.pop_back();
  if (!stages_->agreeOnMore(slots_.size() == depth_)) return false;
  exchangeFirst();
  return true;
}

// Threads first, then what this one does itself.
void BatchPipeline::beside(bool mayDistBeside, bool mayLoadBeside) {
  if (!isComputing_ || std::exchange(hasBeside_, true)) return;
  Slot* exchanged = options_.hasDist && slots_.size() > 1 && !slots_[1].hasStarted ? &slots_[1] : nullptr;
  Slot* loaded = wantsMore(mostComputing_) ? &newSlot() : nullptr;
  if (exchanged != nullptr && mayDistBeside && threads_.distOnThread()) {
    distIsBeside_ = true;
    distThread_.start([this, exchanged] { stages_->onThread([&] { distBeside(*exchanged); }); });
  }
  if (loaded != nullptr && mayLoadBeside && threads_.loadOnThread()) {
    loadIsBeside_ = true;
    loadThread_.start([this, loaded] { stages_->onThread([&] { load(*loaded); }); });
  }
  if (exchanged != nullptr && !distIsBeside_) timed(times_.distBlocked, [&] { startDist(*exchanged); });
  if (loaded != nullptr && !loadIsBeside_) {
    double bound = 0;  // where no thread could have it
    timed(mayLoadBeside ? times_.loadBlocked : bound, [&] { load(*loaded); });
    if (loaded->isEnd) sourceEnded_ = true;
  }
}

void BatchPipeline::takeNewSource() {
  sourceEnded_ = false;
  if (!slots_.empty() && slots_.front().isEnd) dropAll();
  // What the source before had no batch for, and no other rank knows of.
  if (!slots_.empty() && slots_.back().isEnd && !slots_.back().hasStarted) slots_.pop_back();
}

std::optional<BatchNo> BatchPipeline::begin(bool isNewSource) {
  if (isComputing_) end();
  join();
  began_ = Clock::now();
  times_ = {};
  if (isNewSource) takeNewSource();
  if (!options_.executeAllBatches) {
    if (!fillAndAgree()) return std::nullopt;
  } else {
    fill();
  }
  if (slots_.empty()) return std::nullopt;
  Slot& current = slots_.front();
  if (current.error) {
    const std::exception_ptr error = std::exchange(current.error, nullptr);
    if (!current.isEnd) dropFirst(true);
    std::rethrow_exception(error);
  }
  if (current.isEnd) {
    dropAll();
    sourceEnded_ = true;
    return std::nullopt;
  }
  isComputing_ = true;
  hasBeside_ = false;
  return current.batch;
}

void BatchPipeline::middle() {
  if (distIsBeside_ || slots_.size() < 2) return;
  Slot& next = slots_[1];
  if (next.hasStarted && !next.hasFinished) timed(times_.distBlocked, [&] { finishDist(next); });
}

// After the backward, which the data has had for its way.
void BatchPipeline::completeNext() {
  if (!options_.completesAhead || slots_.size() < 2) return;
  Slot& next = slots_[1];
  if (next.hasFinished && !next.hasCompleted) timed(times_.distBlocked, [&] { completeDist(next); });
}

void BatchPipeline::end() {
  if (!isComputing_) return;
  middle();
  join();
  completeNext();
  const bool isFull = slots_.size() == mostComputing_;
  slots_.pop_front();
  isComputing_ = false;
  times_.step = secondsSince(began_);
  if (isFull) threads_.stepTook(times_);
}

// The end of the data on some rank is that of all; what has come beyond it is not computed.
void BatchPipeline::dropAll() {
  while (!slots_.empty()) dropFirst(slots_.front().error != nullptr);
}

void BatchPipeline::dropFirst(bool hasFailed) {
  stages_->discard(slots_.front().batch, hasFailed);
  slots_.pop_front();
}

void BatchPipeline::clear() {
  end();
  join();
  dropAll();
  sourceEnded_ = false;
}

void BatchPipeline::setExecutesAllBatches(bool executesAll) {
  end();
  options_.executeAllBatches = executesAll;
  mostComputing_ = executesAll ? depth_ : depth_ + 1;
}

}  // namespace farandole::pipeline::sparse
