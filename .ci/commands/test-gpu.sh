#!/usr/bin/env bash
# Run the tests that need a GPU, where there is one.
#
# usage: ./dev test-gpu [--kit FOLDER | --no-kit] [--limit SECONDS] [--bench] [--build] [-- ARGUMENTS]
#
#   --kit FOLDER      build from a kit (./dev gpu-kit) and from what this machine has,
#                     without package registries: the interpreter is FARANDOLE_PYTHON or
#                     python3, which has torch (default: build/gpu-kit where it is there)
#   --no-kit          the environment of ./dev test, also where there is a kit
#   --limit SECONDS   start no Python test after that time, and report those that have run
#   --bench           then measure farandole beside NCCL (./dev bench --only cuda)
#   --build           only build, also without a GPU
#   -- ARGUMENTS      for pytest: options (-k name, -x), or paths instead of all below
#
# Runs the C++ tests labelled "gpu", tests/python/gpu, and with their models on GPUs
# (FARANDOLE_TEST_DEVICE=cuda) the tests of pipelines, data parallelism and Megatron's
# API, which ./dev test runs on the CPU. Ends with a table of what ran, what was
# skipped and why, and with the same as JSON, which is left with the reports in
# JUnit's format in build/gpu/reports. Where there is no GPU it says why and succeeds.

source "$ROOT/.ci/lib/setup.sh"
source "$ROOT/.ci/lib/gpu.sh"

kit= limit=0 bench=0 only_build=0
of_gpus=(tests/python/gpu) on_gpus=(tests/python/{pipelining,ddp,megatron_api})
[ ! -f "$ROOT/build/gpu-kit/MANIFEST" ] || kit=$ROOT/build/gpu-kit
while [ $# -gt 0 ]; do
  case $1 in
    --kit) kit=${2:?--kit needs a folder} && shift ;;
    --no-kit) kit= ;;
    --limit) limit=${2:?--limit needs a number} && shift ;;
    --bench) bench=1 ;;
    --build) only_build=1 ;;
    --) shift && break ;;
    *) die "test-gpu: unknown argument '$1' (./dev test-gpu --help)" ;;
  esac
  shift
done
[[ $limit =~ ^[0-9]+$ ]] || die "test-gpu: --limit is '$limit'; expected seconds"
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
options=() paths=()
for argument in "$@"; do
  # What is no path is an option, or the value of one.
  if [ -e "$ROOT/${argument%%::*}" ]; then paths+=("$argument"); else options+=("$argument"); fi
done
if [ ${#paths[@]} -gt 0 ]; then
  of_gpus=() on_gpus=()
  for path in "${paths[@]}"; do
    if [[ $path == *tests/python/gpu* ]]; then of_gpus+=("$path"); else on_gpus+=("$path"); fi
  done
fi
# run_pytest REPORT PATHS...
run_pytest() {
  local report=$reports/$1.xml left=0 status=0 && shift
  [ $# -gt 0 ] || return 0
  if [ "$limit" -gt 0 ]; then
    left=$((limit - (SECONDS - began)))
    [ $left -gt 0 ] || { say "  no time is left for $*" && return 0; }
  fi
  (cd "$ROOT" && "$GPU_PYTHON" -m pytest --session-timeout $left --durations 10 --junitxml "$report" \
    ${options[@]+"${options[@]}"} "$@") || status=$?
  # 5: options have chosen none of these.
  [ $status -eq 0 ] || { [ $status -eq 5 ] && [ ${#options[@]} -gt 0 ]; } || failed=1
}
began=$SECONDS
run_pytest pytest ${of_gpus[@]+"${of_gpus[@]}"}
FARANDOLE_TEST_DEVICE=cuda run_pytest pytest-on-gpus ${on_gpus[@]+"${on_gpus[@]}"}
if [ $bench -eq 1 ]; then
  (cd "$ROOT" && "$GPU_PYTHON" -m farandole.bench --only cuda --json "$reports/bench.json") || failed=1
fi
"$GPU_PYTHON" "$ROOT/.ci/gpu_report.py" "$reports" --probe "$FOUND" || failed=1
exit $failed
