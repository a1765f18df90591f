// One rank of the point-to-point benchmark in C++, through the virtual methods
// of c10d::Backend.
//
// usage: bench_point_to_point RANK STORE_FILE
//
// Two of them meet through the store. Each line on standard input, the same for
// both, is one measurement: "BYTES WARM_UP ITERATIONS SAMPLES". The answer is a
// line of JSON on standard output: [[median, mean], ...], seconds of half a round
// trip for each sample.
// The end of the input ends the program.

#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "backend/c10d/process_group.h"
#include "tests/perf/ping_pong.h"

namespace farandole::perf {
namespace {

constexpr int kRanks = 2;

c10::intrusive_ptr<::c10d::Backend> makeBackend(const std::string& storeFile, int rank) {
  using backend::ProcessGroupFarandole;
  return c10::make_intrusive<ProcessGroupFarandole>(
      c10::make_intrusive<::c10d::FileStore>(storeFile, kRanks), rank, kRanks,
      c10::make_intrusive<ProcessGroupFarandole::Options>(std::chrono::seconds(60)));
}

PingPong parse(const std::string& line) {
  PingPong parameters{};
  std::istringstream words(line);
  words >> parameters.bytes >> parameters.warmUp >> parameters.iterations >> parameters.samples;
  TORCH_CHECK_VALUE(
      words && parameters.bytes >= 0 && parameters.warmUp >= 0 && parameters.iterations > 0 && parameters.samples > 0,
      "the line is '", line, "'; expected four numbers: BYTES WARM_UP ITERATIONS SAMPLES");
  return parameters;
}

void serve(::c10d::Backend& backend, int rank) {
  for (std::string line; std::getline(std::cin, line);) {
    const char* separator = "[";
    for (const HalfRoundTrip& sample : pingPong(backend, rank, parse(line))) {
      std::printf("%s[%.9g, %.9g]", separator, sample.median, sample.mean);
      separator = ", ";
    }
    std::printf("]\n");
    std::fflush(stdout);
  }
}

int run(int argc, char** argv) {
  TORCH_CHECK_VALUE(argc == 3, "got ", argc - 1, " arguments; expected RANK STORE_FILE");
  const int rank = std::atoi(argv[1]);
  TORCH_CHECK_VALUE(rank == 0 || rank == 1, "RANK is ", argv[1], "; expected 0 or 1");
  at::set_num_threads(1);
  const c10::intrusive_ptr<::c10d::Backend> backend = makeBackend(argv[2], rank);
  serve(*backend, rank);
  return 0;
}

}  // namespace
}  // namespace farandole::perf

int main(int argc, char** argv) {
  try {
    return farandole::perf::run(argc, argv);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "bench_point_to_point: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_point_to_point: %s\n", error.what());
  }
  return 1;
}
