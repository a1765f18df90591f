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


def variable(rank: Rank, name: str) -> str | None:
    return os.environ.get(name)


def sizes(rank: Rank) -> tuple[int, int, list[str]]:
    return rank.rank, rank.size, list(rank.groups)


class MarkProcess:
    """Called first of all in a rank's process."""

    def __call__(self, rank: int) -> None:
        os.environ["MARK"] = f"seen by {rank}"
