// One rank of the point-to-point benchmark in C++.
//
// usage: bench_point_to_point RANK STORE_FILE
//
// Two of them meet through the store. Each line on standard input, the same for
// both, is one measurement: "PATH BYTES WARM_UP ITERATIONS SAMPLES", where PATH is
//   repeated messages that are made once and started again and again, as a pipeline's are
//   backend  the virtual methods of c10d::Backend, farandole's
//   group    c10d::ProcessGroup, and so torch's dispatcher, with that backend
//   noop     the same with a backend that moves nothing
// The answer is a line of JSON on standard output: [[median, mean], ...], seconds of
// half a round trip for each sample. The end of the input ends the program.

#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backend/c10d/process_group.h"
#include "tests/perf/noop_backend.h"
#include "tests/perf/ping_pong.h"

namespace farandole::perf {
namespace {

constexpr int kRanks = 2;

using Store = c10::intrusive_ptr<::c10d::Store>;
using Backend = c10::intrusive_ptr<::c10d::Backend>;
using Farandole = c10::intrusive_ptr<backend::ProcessGroupFarandole>;
using Group = c10::intrusive_ptr<::c10d::ProcessGroup>;

struct Paths {
  Farandole backend;
  Group group;
  Group noop;
};

Farandole makeBackend(const Store& store, int rank) {
  using backend::ProcessGroupFarandole;
  return c10::make_intrusive<ProcessGroupFarandole>(
      store, rank, kRanks, c10::make_intrusive<ProcessGroupFarandole::Options>(std::chrono::seconds(60)));
}

Group makeGroup(const Store& store, int rank, const Backend& backend) {
  Group group = c10::make_intrusive<::c10d::ProcessGroup>(store, rank, kRanks);
  group->setBackend(at::kCPU, ::c10d::ProcessGroup::BackendType::CUSTOM, backend);
  return group;
}

Paths makePaths(const std::string& storeFile, int rank) {
  const Store store = c10::make_intrusive<::c10d::FileStore>(storeFile, kRanks);
  const Farandole backend = makeBackend(store, rank);
  const Backend noop = c10::make_intrusive<NoopBackend>(rank, kRanks);
  return {backend, makeGroup(store, rank, backend), makeGroup(store, rank, noop)};
}

std::vector<HalfRoundTrip> measure(const Paths& paths, int rank, const std::string& line) {
  std::string path;
  PingPong parameters{};
  std::istringstream words(line);
  words >> path >> parameters.bytes >> parameters.warmUp >> parameters.iterations >> parameters.samples;
  TORCH_CHECK_VALUE(
      words && parameters.bytes >= 0 && parameters.warmUp >= 0 && parameters.iterations > 0 && parameters.samples > 0,
      "the line is '", line, "'; expected a word and four numbers: PATH BYTES WARM_UP ITERATIONS SAMPLES");
  parameters.moves = path != "noop";
  if (path == "repeated") return pingPong<RepeatedMessages>(*paths.backend, rank, parameters);
  if (path == "backend") return pingPong<::c10d::Backend>(*paths.backend, rank, parameters);
  if (path == "group") return pingPong(*paths.group, rank, parameters);
  TORCH_CHECK_VALUE(path == "noop", "PATH is '", path, "'; expected repeated, backend, group or noop");
  return pingPong(*paths.noop, rank, parameters);
}

void serve(const Paths& paths, int rank) {
  for (std::string line; std::getline(std::cin, line);) {
    const char* separator = "[";
    for (const HalfRoundTrip& sample : measure(paths, rank, line)) {
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
  serve(makePaths(argv[2], rank), rank);
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
