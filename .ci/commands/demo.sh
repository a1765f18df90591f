#!/usr/bin/env bash
# Train a small GPT on 4 processes: 2 pipeline stages x 2 data-parallel replicas.
#
# usage: ./dev demo [OPTIONS OF examples/train_gpt.py]
#        ./dev demo --cpp [OPTIONS OF examples/cpp/train_gpt.cc]
#        ./dev demo --recsys [OPTIONS OF examples/recsys.py]
#
# Does all set-up, then launches examples/train_gpt.py with torchrun. It takes
# about three minutes on two cores. Some of the options (all of them: .venv/bin/python
# examples/train_gpt.py --help):
#
#   --text FILE         train on this file instead of Python's own language reference
#   --backend gloo      the same training over gloo
#   --steps N           optimizer steps
#
# With --cpp: a smaller one in C++, a pipeline of 4 stages without Python, in seconds.
#
#   --schedule NAME     1F1B, ZBV, ... (docs/schedules.md)
#
# With --recsys: a recommender's model on 2 processes, by a plain loop, torchrec's pipeline and
# farandole's, with the torch that there is a torchrec for.

source "$ROOT/.ci/lib/setup.sh"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# By number: the name of a container may have no address.
launch=(--standalone --local-addr 127.0.0.1 --nproc-per-node 4)
if [ "${1:-}" = --cpp ]; then
  setup release train_gpt
  exec "$VENV/bin/torchrun" "${launch[@]}" --no-python "$BUILD/examples/train_gpt" "${@:2}"
fi
if [ "${1:-}" = --recsys ]; then
  TORCH=${FARANDOLE_TORCH_VERSION:-$(torch_of_torchrec).0}
  setup release farandole_python
  link_package
  exec "$VPYTHON" "$ROOT/examples/recsys.py" "${@:2}"
fi
setup release farandole_python
link_package
exec "$VENV/bin/torchrun" "${launch[@]}" "$ROOT/examples/train_gpt.py" "$@"
