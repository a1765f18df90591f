#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>

#include "tests/backend/c10d/cuda/simulated_cuda.h"
#include "tests/backend/c10d/rank_processes.h"

namespace farandole::backend {

// runRanks() with UCX for messages of CUDA tensors: real processes and the real UCX, each with a SimulatedCuda. Prints
// the seed. `enter` is called in the rank's process before the group is made.
void runCudaRanks(int size, const std::function<void(ProcessGroupFarandole&, SimulatedCuda&)>& body, int dies = -1,
                  const std::function<void(int rank)>& enter = nullptr);

// Ranks on one host, and each on one of its own.
class UcxMessagesBetween : public ::testing::TestWithParam<const char*> {
 protected:
  static void run(int size, const std::function<void(ProcessGroupFarandole&, SimulatedCuda&)>& body, int dies = -1);
};

inline at::Tensor bytes(std::int64_t size, int value = 0) { return at::full({size}, value, at::kByte); }

// Of memory that is said to be on CUDA.
WorkPtr send(ProcessGroupFarandole& group, const at::Tensor& host, int peer, int tag = 0);
WorkPtr recv(ProcessGroupFarandole& group, const at::Tensor& host, int peer, int tag = 0);

// Returns when all ranks have come here, whatever became of their messages.
inline void meet(ProcessGroupFarandole& group) { group.barrier({})->wait(); }

// What `action` throws.
std::string errorOf(const std::function<void()>& action);
void expectMentions(const std::string& text, std::initializer_list<const char*> parts);

}  // namespace farandole::backend
