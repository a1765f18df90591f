#include "tests/backend/c10d/cuda/cuda_ranks.h"

#include <iostream>
#include <random>

namespace farandole::backend {

using namespace std::chrono_literals;

namespace {

// Of a rank's process, and never destroyed: the group lives longer than the body.
SimulatedCuda* cuda = nullptr;

}  // namespace

void runCudaRanks(int size, const std::function<void(ProcessGroupFarandole&, SimulatedCuda&)>& body, int dies,
                  const std::function<void(int rank)>& enter) {
  const unsigned seed = std::random_device{}() % 1'000'000;
  std::cout << "seed " << seed << "\n";
  const auto begin = [&](int rank) {
    cuda = new SimulatedCuda(seed + static_cast<unsigned>(rank));
    if (enter) enter(rank);
  };
  const auto run = [&](ProcessGroupFarandole& group) {
    cuda->use(0);
    body(group, *cuda);
    cuda->expectNoViolation();
  };
  runRanks(size, 30s, run, dies, begin);
}

void UcxMessagesBetween::run(int size, const std::function<void(ProcessGroupFarandole&, SimulatedCuda&)>& body,
                             int dies) {
  const bool isOneHost = std::string(GetParam()) == "OneHost";
  runCudaRanks(size, body, dies, [isOneHost](int rank) {
    if (!isOneHost) setenv("FARANDOLE_HOST_ID", ("host " + std::to_string(rank)).c_str(), 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, UcxMessagesBetween, ::testing::Values("OneHost", "SeveralHosts"),
                         [](const auto& info) { return std::string(info.param); });

WorkPtr send(ProcessGroupFarandole& group, const at::Tensor& host, int peer, int tag) {
  std::vector<at::Tensor> tensors{onCuda(host, 0)};
  return group.send(tensors, peer, tag);
}

WorkPtr recv(ProcessGroupFarandole& group, const at::Tensor& host, int peer, int tag) {
  std::vector<at::Tensor> tensors{onCuda(host, 0)};
  return group.recv(tensors, peer, tag);
}

std::string errorOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "no error";
  return "";
}

void expectMentions(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
}

}  // namespace farandole::backend
