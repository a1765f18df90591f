"""What the tests of simulated and of measured steps share: random plans of every schedule, their actions, and pauses."""

from __future__ import annotations

import functools
import os
import random
import re
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from farandole.bench._gpus import sleep_cycles
from farandole.pipelining import Plan, lower, plan, schedule_names
from support.devices import ON_CPU


def seeded_random() -> random.Random:
    """Prints its seed, which FARANDOLE_TEST_SEED gives back."""
    seed = int(os.environ.get("FARANDOLE_TEST_SEED", random.randrange(2**31)))
    print(f"FARANDOLE_TEST_SEED={seed}")
    return random.Random(seed)


def random_plans(rng: random.Random, each: int) -> Iterator[tuple[str, Plan]]:
    """So many plans of every schedule, with messages and without in turn."""
    for name in schedule_names():
        made = 0
        for _ in range(2000):
            if made == each:
                break
            ranks = rng.randint(1, 4)
            stages, microbatches = ranks * rng.randint(1, 3), rng.randint(1, 9)
            try:
                one = plan(name, stages, microbatches, num_ranks=ranks, forward_only=rng.random() < 0.1)
            except ValueError:  # counts that the schedule cannot run
                continue
            yield (
                f"{name}, {stages} stages on {ranks} ranks, {microbatches} microbatches",
                lower(one, "tagged") if made % 2 else one,
            )
            made += 1
        assert made == each, f"no counts were found that {name} can run"


def random_costs(rng: random.Random, num_stages: int) -> list[tuple[float, float, float, float]]:
    return [(rng.uniform(1, 2), rng.uniform(2, 4), rng.uniform(1, 2), rng.uniform(0.5, 2)) for _ in range(num_stages)]


def random_memory(rng: random.Random, num_stages: int) -> list[tuple[float, float]]:
    return [(float(rng.randint(4, 9)), float(rng.randint(0, 4))) for _ in range(num_stages)]


def is_compute(action: str) -> bool:
    return re.fullmatch(r"\d+[FBIW]\d+", action) is not None or action.endswith("OVERLAP_F_B")


def receives(actions: list[str]) -> list[str]:
    """Of one rank, those in batches included."""
    return re.findall(r"\d+RECV_[FB]\d+(?:[<>]\d+)?", ";".join(actions))


def pause(seconds: float) -> None:
    """For so long the host does nothing, or the GPU, after all that it has been given."""
    if ON_CPU:
        time.sleep(seconds)
    else:
        torch.cuda._sleep(round(seconds * _cycles_per_second()))


def prepare_pauses(rank: int, world_size: int) -> None:
    """On every rank, before the first one: the clock of the GPU is measured, by one rank at a time."""
    for turn in range(world_size):
        if turn == rank and not ON_CPU:
            _cycles_per_second()
        dist.barrier()


@functools.cache
def _cycles_per_second() -> int:
    return sleep_cycles(1.0)
