"""Random operations over farandole and over gloo, on the same input; on GPUs over farandole alone.

Integers, extremes and what only moves must be exact, sums and products of floats within the bound that follows from
the number of roundings; what all ranks get must be the same bits on all of them.

FARANDOLE_DIFFERENTIAL_SECONDS sets how long each group size runs (default 6; inf: until it is interrupted, choose a
size with -k and see the rounds with -s), FARANDOLE_DIFFERENTIAL_SEED the first seed (default: a new one each time; it
is printed, and names a failure).
"""

import math
import os
import random

import pytest

from backend.rounds_on_gpus import KINDS_ON_GPUS, run_rounds_on_gpus
from support.devices import ON_CPU
from support.processes import run_ranks
from support.rounds import KINDS, run_rounds

SECONDS = float(os.environ.get("FARANDOLE_DIFFERENTIAL_SECONDS", "6"))


@pytest.mark.timeout(0 if math.isinf(SECONDS) else 4 * 60 + 4 * SECONDS)  # 0: none
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_operations_give_what_gloo_gives(world_size):
    seed = int(os.environ.get("FARANDOLE_DIFFERENTIAL_SEED", random.randrange(1 << 30)))
    print(f"FARANDOLE_DIFFERENTIAL_SEED={seed}", flush=True)
    run, kinds_of_all = (run_rounds, KINDS) if ON_CPU else (run_rounds_on_gpus, KINDS_ON_GPUS)
    results = run_ranks(run, world_size, "farandole", timeout=60 + 2 * SECONDS, first_seed=seed, seconds=SECONDS)
    rounds, kinds = results[0]
    print(f"{rounds} rounds")
    assert rounds >= 20 and all(result == results[0] for result in results)
    if rounds >= 800:
        assert kinds == kinds_of_all
