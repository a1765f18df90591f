#include "tests/backend/c10d/rank_processes.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

namespace farandole::backend {
namespace {

struct Ranks {
  int size;
  int dies;
  std::chrono::milliseconds timeout;
  std::function<void(ProcessGroupFarandole&)> body;
  std::function<void(int rank)> enter;
  std::string storeFile;
};

void runRank(const Ranks& ranks, int rank) {
  at::set_num_threads(1);
  if (ranks.enter) ranks.enter(rank);
  const auto store = c10::make_intrusive<::c10d::FileStore>(ranks.storeFile, ranks.size);
  const auto group = c10::make_intrusive<ProcessGroupFarandole>(
      store, rank, ranks.size, c10::make_intrusive<ProcessGroupFarandole::Options>(ranks.timeout));
  ranks.body(*group);
  // Who leaves ends what waits for it.
  store->set("done" + std::to_string(rank), std::vector<std::uint8_t>{1});
  for (int other = 0; other < ranks.size; ++other) {
    for (int i = 0; i < 500 && other != ranks.dies && !store->check({"done" + std::to_string(other)}); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

pid_t startRank(const Ranks& ranks, int rank) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  try {
    runRank(ranks, rank);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank << ": " << error.what();
  }
  std::fflush(nullptr);
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

// What the process ended with, or SIGKILL after the limit.
int endOf(pid_t pid, std::chrono::steady_clock::time_point limit) {
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > limit) {
      ADD_FAILURE() << "process " << pid << " was not done in time";
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return status;
}

}  // namespace

void runRanks(int size, std::chrono::milliseconds timeout, const std::function<void(ProcessGroupFarandole&)>& body,
              int dies, const std::function<void(int rank)>& enter) {
  std::string folder = testing::TempDir() + "farandole-ranks-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const Ranks ranks{size, dies, timeout, body, enter, folder + "/store"};
  std::fflush(nullptr);
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) processes.push_back(startRank(ranks, rank));
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (int rank = 0; rank < size; ++rank) {
    const int status = endOf(processes[rank], limit);
    if (rank == dies) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "rank " << rank << ", status " << status;
    } else {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << ", status " << status;
    }
  }
  unlink(ranks.storeFile.c_str());
  rmdir(folder.c_str());
}

}  // namespace farandole::backend
