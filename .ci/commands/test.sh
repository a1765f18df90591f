#!/usr/bin/env bash
# Build everything, then run the C++ and the Python tests.
#
# usage: ./dev test [--cpp | --python] [--preset NAME] [-- ARGUMENTS]
#
#   --cpp             only the C++ tests (ctest)
#   --python          only the Python tests (pytest)
#   --preset NAME     release (the default) or debug; asan and tsan build and run
#                     what is free of torch under sanitizers (C++ tests only);
#                     asan-torch: everything, the Python tests too
#   -- ARGUMENTS      for pytest with --python (-k name, -x, a path), for ctest
#                     with --cpp (-R name)
#
# Prints the totals, and fails when a test fails, when there is none or when a
# sanitizer has something to report. Reports in JUnit's format are left in
# build/<preset>/reports, those of sanitizers beside them.

source "$ROOT/.ci/lib/setup.sh"
source "$ROOT/.ci/lib/sanitizers.sh"

preset=release cpp=1 python=1
while [ $# -gt 0 ]; do
  case $1 in
    --cpp) python=0 ;;
    --python) cpp=0 ;;
    --preset) preset=${2:?--preset needs a name} && shift ;;
    --) shift && break ;;
    *) die "test: unknown argument '$1' (./dev test --help)" ;;
  esac
  shift
done
[ $((cpp + python)) -gt 0 ] || die "test: --cpp and --python exclude each other"
[ $# -eq 0 ] || [ $((cpp + python)) -eq 1 ] || die "test: arguments after -- need --cpp or --python"
case $preset in
  release | debug | asan-torch) ;;
  asan | tsan) python=0 ;;
  *) die "test: --preset $preset: expected release, debug, asan, asan-torch or tsan" ;;
esac

setup "$preset" all
pytest=("$VPYTHON" -m pytest)
reports=$BUILD/reports
rm -rf "$reports" && mkdir -p "$reports"
case $preset in
  release | debug) link_package ;;
  asan | asan-torch) report_to "$reports/sanitizers" ;;
  # UCX's hook of madvise runs at the end of a thread, when the sanitizer has already taken its leave of it.
  tsan) export UCX_MEM_EVENTS=n ;;
esac
if [ "$preset" = asan-torch ]; then
  "$VPYTHON" "$ROOT/.ci/link_package.py" "$BUILD/python" "$BUILD/python"
  pytest=(with_sanitizers "$BUILD/python" "${pytest[@]}")
fi

# Both suites run even when the first one fails.
failed=0
if [ $cpp -eq 1 ]; then
  "$VENV/bin/ctest" --test-dir "$BUILD" --parallel "$(nproc)" --output-on-failure --no-tests=error --progress \
    --output-junit "$reports/ctest.xml" "$@" || failed=1
fi
if [ $python -eq 1 ]; then
  (cd "$ROOT" && "${pytest[@]}" --junitxml "$reports/pytest.xml" "$@") || failed=1
fi
"$VPYTHON" "$ROOT/.ci/totals.py" "torch $TORCH, $preset" "$reports"/*.xml || failed=1
show_reports "$reports/sanitizers" || failed=1
exit $failed
