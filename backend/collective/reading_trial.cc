#include "backend/collective/reading_trial.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "backend/collective/algorithms.h"

namespace farandole::collective {
namespace {

using Clock = std::chrono::steady_clock;

// For each rank, the largest first: where reading that is not faster, nothing is.
constexpr std::array<std::size_t, 4> kSizes = {256 << 10, 64 << 10, 32 << 10, 16 << 10};
// The shortest time of these counts, on both sides of the comparison: what else goes on makes the others longer.
constexpr int kRounds = 9;
// Of the time through the windows, which reading must not take all of.
constexpr double kClearlyFaster = 0.95;

struct Data {
  std::vector<std::byte> given = std::vector<std::byte>(kSizes.front(), std::byte{1});
  std::vector<std::byte> taken = std::vector<std::byte>(2 * kSizes.front(), std::byte{2});
};

// A program that its caller waits for. The transport may use its data after an early end.
class TrialOperation final : public ProgramOperation, public std::enable_shared_from_this<TrialOperation> {
 public:
  TrialOperation(std::shared_ptr<Communicator> communicator, std::shared_ptr<Data> data)
      : ProgramOperation(std::move(communicator)), data_(std::move(data)) {}

 private:
  std::string describe() const override { return "the trial of how two ranks of a host swap"; }
  void retain() override { self_ = shared_from_this(); }
  void release() override { self_.reset(); }

  const std::shared_ptr<Data> data_;
  std::shared_ptr<TrialOperation> self_;
};

// One rank's side. Both run the same programs; the first one's times count.
class Trial {
 public:
  Trial(const std::shared_ptr<Communicator>& communicator, Clock::time_point deadline)
      : communicator_(communicator),
        deadline_(deadline),
        passing_(AlgorithmTable::withOverrides("all_gather=slots").value()),
        reading_(AlgorithmTable::withOverrides("all_gather=memory").value()) {}

  // What either of them knows already; where both do, the first one.
  Result<std::size_t> known(std::size_t own) {
    std::memcpy(data_->given.data(), &own, sizeof own);
    FARANDOLE_RETURN_IF_ERROR(gather(passing_, sizeof own));
    std::array<std::size_t, 2> all{};
    std::memcpy(all.data(), data_->taken.data(), sizeof all);
    return all[0] != kReadingUnknown ? all[0] : all[1];
  }

  // Whether both may read the other's memory.
  Result<bool> canRead() { return verdictOfFirst(communicator_->topology().segment->everybodyReads()); }

  Result<bool> isReadingFaster(std::size_t bytes) {
    Clock::duration passing = Clock::duration::max();
    Clock::duration reading = Clock::duration::max();
    for (int i = 0; i < kRounds; ++i) {
      FARANDOLE_RETURN_IF_ERROR(time(passing_, bytes, passing));
      FARANDOLE_RETURN_IF_ERROR(time(reading_, bytes, reading));
    }
    return verdictOfFirst(reading < kClearlyFaster * passing);
  }

 private:
  Status run(Program program) {
    auto operation = std::make_shared<TrialOperation>(communicator_, data_);
    operation->setTimeout(std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now()));
    operation->setProgram(std::move(program), 0);
    {
      transport::ProgressEngine::Access access(communicator_->engine());
      operation->start();
    }
    operation->wait(transport::kNoDeadline);
    return operation->status();
  }

  Result<bool> verdictOfFirst(bool own) {
    std::byte& verdict = data_->taken[0];
    verdict = std::byte{own};
    Program program;
    broadcast(program, communicator_->topology(), 0, {&verdict, 1});
    FARANDOLE_RETURN_IF_ERROR(run(std::move(program)));
    return verdict != std::byte{0};
  }

  Status gather(const AlgorithmTable& table, std::size_t bytes) {
    Topology topology = communicator_->topology();
    topology.table = &table;
    std::byte* const taken = data_->taken.data();
    const std::array<Slice, 2> outputs = {Slice{taken, bytes}, Slice{taken + bytes, bytes}};
    Program program;
    allGather(program, topology, {data_->given.data(), bytes}, outputs);
    return run(std::move(program));
  }

  Status time(const AlgorithmTable& table, std::size_t bytes, Clock::duration& shortest) {
    // Else what the other one still has to take of the last one would count.
    Program meeting;
    barrier(meeting, communicator_->topology());
    FARANDOLE_RETURN_IF_ERROR(run(std::move(meeting)));
    const auto start = Clock::now();
    FARANDOLE_RETURN_IF_ERROR(gather(table, bytes));
    shortest = std::min(shortest, Clock::now() - start);
    return Status::ok();
  }

  const std::shared_ptr<Communicator> communicator_;
  const Clock::time_point deadline_;
  const AlgorithmTable passing_;
  const AlgorithmTable reading_;
  const std::shared_ptr<Data> data_ = std::make_shared<Data>();
};

}  // namespace

Result<std::size_t> agreeOnReading(const std::shared_ptr<Communicator>& communicator, std::size_t known,
                                   std::chrono::milliseconds timeout) {
  Trial trial(communicator, Clock::now() + timeout);
  const Result<std::size_t> told = trial.known(known);
  if (!told) return told;
  const Result<bool> canRead = trial.canRead();
  if (!canRead) return canRead.status();
  if (!*canRead) return Topology::kNeverReads;
  if (*told != kReadingUnknown) return told;
  std::size_t from = Topology::kNeverReads;
  for (const std::size_t bytes : kSizes) {
    const Result<bool> isFaster = trial.isReadingFaster(bytes);
    if (!isFaster) return isFaster.status();
    if (!*isFaster) break;
    from = bytes;
  }
  return from;
}

}  // namespace farandole::collective
