#!/usr/bin/env bash
# Lay out all C++ and Python files as the project does.
#
# usage: ./dev format
#
# clang-format and ruff, in place. ./dev lint checks the same without changing.

source "$ROOT/.ci/lib/setup.sh"

[ $# -eq 0 ] || die "format: takes no arguments, got '$*'"
lock
ensure_system
ensure_python
unlock
cd "$ROOT"
mapfile -t cpp < <(git ls-files --cached --others --exclude-standard '*.h' '*.cc')
"$VENV/bin/clang-format" -i "${cpp[@]}"
"$VENV/bin/ruff" check --quiet --fix-only .
"$VENV/bin/ruff" format --quiet .
say "formatted ${#cpp[@]} C++ files and all Python files"
