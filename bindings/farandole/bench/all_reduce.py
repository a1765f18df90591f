"""``dist.all_reduce`` of float32, summed over two processes, beside gloo."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from farandole.bench._ranks import RANKS, Rank, RankPair
from farandole.bench._series import Report, Sample, Series, interleave, ratio, size_name
from farandole.bench._settings import Settings
from farandole.bench._timing import time_each

_SAMPLES = 3
_SIZES = [8**power for power in range(1, 9)] + [64 * 2**20]
_BACKENDS = ["farandole", "gloo"]


def reduce_often(rank: Rank, backend: str, size: int, warm_up: int, count: int, samples: int) -> list[Sample]:
    """Runs on both ranks."""
    group = rank.groups[backend]
    tensor = torch.full((size // 4,), float(rank.rank + 1))
    dist.all_reduce(tensor, group=group)
    expected = sum(range(1, RANKS + 1))
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

    def slowest(backend: str, size: int, count: int) -> list[list[Sample]]:
        warm_up = max(1, count // 10)
        ranks = pair.call(reduce_often, backend=backend, size=size, warm_up=warm_up, count=count, samples=_SAMPLES)
        return [[max(samples) for samples in zip(*ranks, strict=True)]]

    for size in _SIZES:
        count = settings.count(max(4, min(400, 2**24 // size)))
        series = [Series(size_name(size), backend) for backend in _BACKENDS]
        interleave(
            settings.rounds,
            [([one], partial(slowest, one.peer, size, count)) for one in series],
            settings.tick,
        )
        report.series += series
        report.ratios.append(ratio("gloo / farandole", series[1], series[0]))
    return report
