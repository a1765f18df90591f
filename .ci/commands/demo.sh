#!/usr/bin/env bash
# Train a small GPT on 4 processes: 2 pipeline stages x 2 data-parallel replicas.
#
# usage: ./dev demo [OPTIONS OF examples/train_gpt.py]
#
# Does all set-up, then launches examples/train_gpt.py with torchrun. It takes
# about three minutes on two cores. Some of the options (all of them: .venv/bin/python
# examples/train_gpt.py --help):
#
#   --text FILE         train on this file instead of Python's own language reference
#   --backend gloo      the same training over gloo
#   --steps N           optimizer steps

source "$ROOT/.ci/lib/setup.sh"

setup release farandole_python
link_package
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# By number: the name of a container may have no address.
exec "$VENV/bin/torchrun" --standalone --local-addr 127.0.0.1 --nproc-per-node 4 "$ROOT/examples/train_gpt.py" "$@"
