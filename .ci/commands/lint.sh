#!/usr/bin/env bash
# Check formatting, naming, types and common mistakes; changes nothing.
#
# usage: ./dev lint [--all] [--fast]
#
#   --fast      leave out clang-tidy
#   --all       run clang-tidy again on files that it has passed before
#
# clang-format and clang-tidy on the C++ files, ruff and mypy on the Python
# ones. clang-tidy remembers what it has passed (by the content of a file and of
# all that it includes), so only the first run is slow. All checks run; the exit
# status is non-zero when one of them complains. ./dev format mends the layout.

source "$ROOT/.ci/lib/setup.sh"

fast=0 tidy=()
for argument in "$@"; do
  case $argument in
    --fast) fast=1 ;;
    --all) tidy+=(--all) ;;
    *) die "lint: unknown argument '$argument' (./dev lint --help)" ;;
  esac
done

lock
[ $fast -eq 1 ] || tool=clang-tidy
ensure_system ${tool:-}
ensure_python
unlock
cd "$ROOT"
failed=0
check() {
  local label=$1 start=$EPOCHREALTIME
  shift
  if "$@"; then say "ok      $label  ($(seconds_since "$start"))"; else say "FAILED  $label" && failed=1; fi
}

mapfile -t cpp < <(git ls-files --cached --others --exclude-standard '*.h' '*.cc')
check clang-format "$VENV/bin/clang-format" --dry-run -Werror "${cpp[@]}"
check "ruff check" "$VENV/bin/ruff" check --quiet .
check "ruff format" "$VENV/bin/ruff" format --check --quiet .
check mypy "$VENV/bin/mypy" --no-error-summary
if [ $fast -eq 0 ]; then
  check clang-tidy "$VPYTHON" .ci/tidy.py --jobs "$(build_jobs)" "${tidy[@]}"
fi
exit $failed
