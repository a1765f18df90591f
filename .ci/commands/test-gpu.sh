#!/usr/bin/env bash
# Run the tests that need a GPU, where there is one.
#
# usage: ./dev test-gpu [--kit FOLDER | --no-kit] [--jobs N] [--limit SECONDS] [--bench] [--build] [-- ARGUMENTS]
#
#   --kit FOLDER      build from a kit (./dev gpu-kit) and from what this machine has,
#                     without package registries: the interpreter is FARANDOLE_PYTHON or
#                     python3, which has torch (default: build/gpu-kit where it is there)
#   --no-kit          the environment of ./dev test, also where there is a kit
#   --jobs N          run so many files of Python tests at a time (default: by the cores
#                     and the memory of the GPUs)
#   --limit SECONDS   start no Python test after that time, and report those that have run
#   --bench           then measure farandole beside NCCL (./dev bench --only cuda)
#   --build           only build, also without a GPU
#   -- ARGUMENTS      paths instead of all below, then options for pytest (-k name, -x)
#
# Runs the C++ tests labelled "gpu", tests/python/gpu, and with their models and tensors
# on GPUs (FARANDOLE_TEST_DEVICE=cuda) the tests of pipelines, data parallelism,
# Megatron's API, the sparse train pipeline and the backend, which ./dev test runs on the
# CPU. Ends with a table of what ran, what was skipped and why, and with the same as
# JSON, which is left in build/gpu/reports with what each file wrote and a report of it in
# JUnit's format. Where there is no GPU it says why and succeeds.

source "$ROOT/.ci/lib/setup.sh"
source "$ROOT/.ci/lib/gpu.sh"

kit= limit=0 jobs= bench=0 only_build=0
[ ! -f "$ROOT/build/gpu-kit/MANIFEST" ] || kit=$ROOT/build/gpu-kit
while [ $# -gt 0 ]; do
  case $1 in
    --kit) kit=${2:?--kit needs a folder} && shift ;;
    --no-kit) kit= ;;
    --limit) limit=${2:?--limit needs a number} && shift ;;
    --jobs) jobs=${2:?--jobs needs a number} && shift ;;
    --bench) bench=1 ;;
    --build) only_build=1 ;;
    --) shift && break ;;
    *) die "test-gpu: unknown argument '$1' (./dev test-gpu --help)" ;;
  esac
  shift
done
[[ $limit =~ ^[0-9]+$ ]] || die "test-gpu: --limit is '$limit'; expected seconds"
[[ $jobs =~ ^([1-9][0-9]*)?$ ]] || die "test-gpu: --jobs is '$jobs'; expected a number of files"
[ -z "$kit" ] || [ -f "$kit/MANIFEST" ] || die "test-gpu: --kit $kit: expected a folder that ./dev gpu-kit made"

# probe WHAT INTERPRETER: sets FOUND; without a GPU it ends here.
probe() {
  local status=0
  FOUND=$("$2" "$ROOT/.ci/gpu_probe.py" "$1") || status=$?
  case $status in
    0) ;;
    3) say "test-gpu: skipped: $FOUND" && exit 0 ;;
    *) die "test-gpu: .ci/gpu_probe.py $1 failed with status $status" ;;
  esac
}

if [ $only_build -eq 0 ]; then
  command -v "$HAVE_PYTHON" >/dev/null || die "test-gpu: there is no interpreter '$HAVE_PYTHON'"
  probe driver "$HAVE_PYTHON"
  [ -z "$kit" ] || probe torch "$HAVE_PYTHON"
fi
if [ -n "$kit" ]; then
  build_from_kit "$kit"
else
  setup release all
  link_package
  GPU_PYTHON=$VPYTHON CTEST=$VENV/bin/ctest
fi
[ $only_build -eq 0 ] || exit 0
probe torch "$GPU_PYTHON"
say "  $FOUND"

reports=$ROOT/build/gpu/reports
rm -rf "$reports" && mkdir -p "$reports"
failed=0
"$CTEST" --test-dir "$BUILD" -L gpu --output-on-failure --no-tests=error --output-junit "$reports/ctest.xml" || failed=1
(cd "$ROOT" && "$GPU_PYTHON" .ci/gpu_tests.py ${jobs:+--jobs "$jobs"} --limit "$limit" "$reports" "$@") || failed=1
if [ $bench -eq 1 ]; then
  (cd "$ROOT" && "$GPU_PYTHON" -m farandole.bench --only cuda --json "$reports/bench.json") || failed=1
fi
"$GPU_PYTHON" "$ROOT/.ci/gpu_report.py" "$reports" --probe "$FOUND" || failed=1
exit $failed
