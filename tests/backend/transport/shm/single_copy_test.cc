#include "backend/transport/shm/single_copy.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <vector>

namespace farandole::transport {
namespace {

TEST(SingleCopy, ATrialTellsTheFirstWordOfWhatAnotherProcessHas) {
  std::vector<std::byte> data(kProbeBytes, std::byte{7});
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  const ReadingTrial trial = tryToRead(child, data.data());
  ASSERT_TRUE(trial.firstWord);
  EXPECT_EQ(*trial.firstWord, 0x0707070707070707u);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(tryToRead(child, data.data()).firstWord);
}

TEST(SingleCopy, WhatIsNotMappedCannotBeReadAndTheErrorSaysWhatHelps) {
  EXPECT_FALSE(tryToRead(getpid(), reinterpret_cast<const std::byte*>(4096)).firstWord);
  std::byte to{};
  const Status status = copyFromProcess(getpid(), &to, reinterpret_cast<const std::byte*>(4096), 1);
  EXPECT_NE(status.toString().find("FARANDOLE_SHM_SINGLE_COPY=off"), std::string::npos) << status.toString();
}

}  // namespace
}  // namespace farandole::transport
