"""Random operations over farandole and over gloo, on the same input.

What moves data or adds integers must agree bit by bit, as must all that two
ranks add; sums of floats over more ranks agree within rounding. What gloo cannot
do is compared with torch's own arithmetic.

FARANDOLE_DIFFERENTIAL_SECONDS sets how long each group size runs (default 6),
FARANDOLE_DIFFERENTIAL_SEED the first seed (default: a new one each time; it is
printed, and names a failure).
"""

import os
import random

import pytest

from support.processes import run_ranks
from support.rounds import KINDS, run_rounds

SECONDS = float(os.environ.get("FARANDOLE_DIFFERENTIAL_SECONDS", "6"))


@pytest.mark.timeout(4 * 60 + 4 * SECONDS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_operations_give_what_gloo_gives(world_size):
    seed = int(os.environ.get("FARANDOLE_DIFFERENTIAL_SEED", random.randrange(1 << 30)))
    print(f"FARANDOLE_DIFFERENTIAL_SEED={seed}")
    results = run_ranks(run_rounds, world_size, "farandole", timeout=60 + 2 * SECONDS, first_seed=seed, seconds=SECONDS)
    rounds, kinds = results[0]
    print(f"{rounds} rounds")
    assert rounds >= 20 and all(result == results[0] for result in results)
    if rounds >= 200:
        assert kinds == sorted(KINDS)
