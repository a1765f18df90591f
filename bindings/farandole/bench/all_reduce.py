"""``dist.all_reduce`` of float32, summed over two processes, beside gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from farandole.bench._beside_gloo import measure_beside_gloo
from farandole.bench._ranks import Rank, RankPair
from farandole.bench._series import Report, Sample
from farandole.bench._settings import Settings
from farandole.bench._timing import time_each

_SIZES = [8, 512, 4 * 2**10, 64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 16 * 2**20, 64 * 2**20]
_TARGETS = {8: 8.0, 64 * 2**10: 12.0, 2**20: 7.0, 64 * 2**20: 3.0}


def reduce_often(rank: Rank, backend: str, size: int, warm_up: int, count: int, samples: int) -> list[Sample]:
    """Runs on all ranks."""
    group = rank.groups[backend]
    tensor = torch.full((size // 4,), float(rank.rank + 1))
    dist.all_reduce(tensor, group=group)
    expected = sum(range(1, rank.size + 1))
    if not torch.equal(tensor, torch.full_like(tensor, expected)):
        raise RuntimeError(f"{backend}: the sum of {size} bytes is wrong")
    tensor.zero_()  # stays what it is however often it is summed

    def operation() -> None:
        dist.all_reduce(tensor, group=group)

    for _ in range(warm_up):
        operation()
    return time_each(operation, count, samples)


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("all_reduce", "all_reduce over 2 processes, float32, Python")
    return measure_beside_gloo(report, settings, pair, reduce_often, _SIZES, _TARGETS)
