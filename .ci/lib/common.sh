# Sourced by every command: strict mode, names of folders, readable progress.
set -euo pipefail

: "${ROOT:?run this through ./dev}"
DEFAULT_TORCH=2.15.0
TORCH=${FARANDOLE_TORCH_VERSION:-$DEFAULT_TORCH}
UCX_WHEEL=libucx-cu13==1.22.0
LOGS=$ROOT/build/logs

say() { printf '%s\n' "$*"; }
die() {
  printf 'dev: %s\n' "$*" >&2
  exit 1
}

# seconds_since START, with START from $EPOCHREALTIME, as "12.3 s".
seconds_since() { awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f s", b - a }'; }

# step LABEL LOG COMMAND...: runs the command with its output in build/logs/LOG.
# A terminal shows the last line of progress; a failure shows the end of the log.
step() {
  local label=$1 log=$LOGS/$2 start=$EPOCHREALTIME status=0
  shift 2
  mkdir -p "$LOGS"
  "$@" >"$log" 2>&1 </dev/null &
  local pid=$!
  if [ -t 1 ]; then
    while kill -0 "$pid" 2>/dev/null; do
      local line
      line=$(tail -c 400 "$log" 2>/dev/null | tr '\r' '\n' | grep -v '^ *$' | tail -1 | tr -cd '[:print:]' || true)
      printf '\r\033[K  %s  %s  %.60s' "$label" "$(seconds_since "$start")" "$line"
      sleep 0.2
    done
    printf '\r\033[K'
  fi
  wait "$pid" || status=$?
  if [ "$status" -ne 0 ]; then
    say "FAILED: $label (exit status $status). The end of ${log#"$ROOT"/}:" >&2
    tail -40 "$log" | sed 's/^/    /' >&2
    exit "$status"
  fi
  say "  $label  ($(seconds_since "$start"))"
}
