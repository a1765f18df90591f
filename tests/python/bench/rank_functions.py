"""What test_ranks.py runs on the ranks."""

import os
import time

import torch
import torch.distributed as dist

from farandole.bench._ranks import Rank


def sums(rank: Rank) -> dict[str, float]:
    totals = {}
    for name in ("farandole", "gloo"):
        tensor = torch.tensor([float(rank.rank + 1)])
        dist.all_reduce(tensor, group=rank.groups[name])
        totals[name] = tensor.item()
    return totals


def remember(rank: Rank, value: int) -> int:
    return rank.state.setdefault("value", value)


def fail_on(rank: Rank, failing: int) -> None:
    if rank.rank == failing:
        raise ValueError("the lamp is out")


def die_on(rank: Rank, failing: int) -> None:
    if rank.rank == failing:
        os._exit(3)


def sleep(rank: Rank) -> None:
    time.sleep(60)
