#!/usr/bin/env bash
# Measure farandole beside gloo, torch's pipelining and UCX itself.
#
# usage: ./dev bench [--quick] [--json FILE] [--only SUBJECT] [--rounds N]
#
#   --quick           few repetitions: shows that it runs, in about a minute
#   --json FILE       every sample, medians, and facts about the machine
#   --only SUBJECT    point_to_point, batch, all_reduce or pipeline; may be given again
#   --rounds N        turns of every peer (default: 9, with --quick 5)
#
# The peers take turns, round after round, in one invocation: what slows the
# machine down slows all of them, so compare figures of one invocation only.
# Leave the machine alone meanwhile. The targets at the end are those of 2 cores.

source "$ROOT/.ci/lib/setup.sh"

# Checked here already: set-up takes minutes.
options=("$@")
while [ $# -gt 0 ]; do
  case $1 in
    --quick) ;;
    --json | --only | --rounds) [ $# -ge 2 ] || die "bench: $1 needs a value" && shift ;;
    --json=* | --only=* | --rounds=*) ;;
    *) die "bench: unknown argument '$1' (./dev bench --help)" ;;
  esac
  shift
done

setup release farandole_python bench_point_to_point
link_package
# Threads of the peers' math libraries: one for each rank.
export OMP_NUM_THREADS=1
exec "$VPYTHON" -m farandole.bench "${options[@]}"
