# setup PRESET TARGET...: everything up to a fresh build that the environment
# can import. One at a time for each checkout.
source "$ROOT/.ci/lib/common.sh"
source "$ROOT/.ci/lib/system.sh"
source "$ROOT/.ci/lib/python.sh"
source "$ROOT/.ci/lib/build.sh"

lock() {
  mkdir -p "$ROOT/build"
  exec 9>"$ROOT/build/.lock"
  if ! flock -n 9; then
    say "  waiting for another ./dev in this checkout"
    flock 9
  fi
}
unlock() { exec 9>&-; }

setup() {
  lock
  ensure_system
  ensure_python
  ensure_build "$@"
  unlock
}
