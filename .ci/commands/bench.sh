#!/usr/bin/env bash
# Measure farandole beside gloo, Intel MPI, torch's pipelining and UCX itself.
#
# usage: ./dev bench [--quick] [--json FILE] [--all | --only SUBJECT] [--rounds N] [--mpi PREFIX]
#
#   --quick           few repetitions: shows that it runs, in about a minute
#   --json FILE       every sample, medians, and facts about the machine
#   --only SUBJECT    one of those below; may be given again
#   --all             all of those below
#   --rounds N        turns of every peer (default: 9, with --quick 5)
#   --mpi PREFIX      environment with the wheels impi-rt, mpi4py and numpy, for "collectives"
#
# Without --only and --all:
#   point_to_point    half a round trip, from the wire through C++ to Python
#   batch             batch_isend_irecv in a ring of two, beside gloo
#   all_reduce        two processes, beside gloo
#   pipeline          a step of 1F1B and of interleaved 1F1B, beside torch's and the ideal
#   overlap           a loop that computes beside an asynchronous all_reduce
# When asked for, since they take minutes or a set-up of their own:
#   collectives       four collectives beside gloo and Intel MPI
#   oversubscribed    4 and 8 processes, beside gloo; and computing beside an idle group
#   actions           what an action of a schedule costs, beside torch's runtime
#   schedules         a step of every schedule on 4 ranks whose stages sleep, beside the simulated one
#   predicted         steps beside what was simulated from measured costs
#   megatron          a forward-backward step, beside Megatron-core
#   data_parallel     what data parallelism adds to a backward, beside torch's DDP
#   sparse            a step of the sparse train pipeline, beside a plain loop and torchrec's pipeline
#                     (these need FARANDOLE_TORCH_VERSION=2.11.0)
#   hosts             between network namespaces, beside gloo; needs root
#   cuda              CUDA tensors beside NCCL; needs a GPU
#
# The peers take turns, round after round, in one invocation: what slows the
# machine down slows all of them, so compare figures of one invocation only.
# Leave the machine alone meanwhile. The targets at the end are those of 2 cores.

source "$ROOT/.ci/lib/setup.sh"

# Checked here already: set-up takes minutes.
options=("$@")
while [ $# -gt 0 ]; do
  case $1 in
    --quick | --all) ;;
    --json | --only | --rounds | --mpi) [ $# -ge 2 ] || die "bench: $1 needs a value" && shift ;;
    --json=* | --only=* | --rounds=* | --mpi=*) ;;
    *) die "bench: unknown argument '$1' (./dev bench --help)" ;;
  esac
  shift
done

setup release farandole_python bench_point_to_point noop_backend
link_package
# Threads of the peers' math libraries: one for each rank.
export OMP_NUM_THREADS=1
# Every peer keeps the memory that it has freed: else glibc gives it back, and steps pay for thousands of page faults, or
# for none, as it happens (docs/data_parallel.md).
export MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_THRESHOLD_=4294967296
exec "$VPYTHON" -m farandole.bench "${options[@]}"
