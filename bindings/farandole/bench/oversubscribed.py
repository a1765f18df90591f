"""More ranks than cores: all_reduce beside gloo, and what an idle group takes from a program that computes.

A time of all_reduce is the mean of a sample's runs, not their median: ranks that share a core get it in turns, so that
single runs are either very short or very long, and only the sum says how long a program waits.

The computing thread does a fixed work of about 20 ms that stays in the cache of its core, on one rank, shortly after a
collective of its group, when all ranks are idle; in turn with a process that has no group at all. What counts is the
median of many turns.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from farandole.bench._beside_gloo import measure_beside_gloo
from farandole.bench._ranks import Rank, RankPair, Ranks
from farandole.bench._series import Report, Sample, Series, Target, interleave, ratio
from farandole.bench._settings import Settings
from farandole.bench._timing import time_each
from farandole.bench._work import multiply
from farandole.bench.all_reduce import reduce_often

_RANKS = [4, 8]
_SIZES = [8, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20]
_TARGETS = {size: 3.0 if size <= 64 * 2**10 else 1.0 for size in _SIZES}
_WORK = 800
_UNTIL_IDLE = 0.02  # seconds
_TURNS = 20  # of computing, per round: a hundredth is to be seen
_SPEED_KEPT = 0.98


def _count(size: int) -> int:
    return max(4, min(40, 2**24 // size))  # gloo takes up to 20 ms for 4 KiB


def reduce_in_turns(rank: Rank, **arguments: Any) -> list[Sample]:
    """Runs on all ranks."""
    return [Sample(sample.mean, sample.mean) for sample in reduce_often(rank, **arguments)]


def compute(rank: Rank, work: int) -> list[Sample]:
    """Runs on all ranks; rank 0 computes, the others are idle."""
    for group in rank.groups.values():
        dist.all_reduce(torch.ones(1), group=group)
    if rank.rank != 0:
        return []
    time.sleep(_UNTIL_IDLE)  # the others answer, and sleep
    return time_each(partial(multiply, work), 1, 1)


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("oversubscribed", "all_reduce over more processes than cores, float32, Python; and computing")
    for size in _RANKS:
        with Ranks(size, ("farandole", "gloo")) as ranks:
            case = f"{size} ranks, {{}}"
            measure_beside_gloo(report, settings, ranks, reduce_in_turns, _SIZES, _TARGETS, case, _count)
    for size in _RANKS:
        _measure_computing(report, settings, size)
    return report


def _measure_computing(report: Report, settings: Settings, size: int) -> None:
    case = f"computing, the group of {size} idle"
    idle, alone = Series(case, "farandole"), Series(case, "no group")
    with Ranks(size, ("farandole",)) as ranks, Ranks(1, ()) as nobody:

        def both() -> list[list[Sample]]:
            samples: list[list[Sample]] = [[], []]
            for _ in range(settings.count(_TURNS)):
                samples[0] += ranks.call(compute, work=_WORK)[0]
                samples[1] += nobody.call(compute, work=_WORK)[0]
            return samples

        both()  # the first turns warm up
        interleave(settings.rounds, [([idle, alone], both)], settings.tick)
    kept = ratio("no group / farandole", alone, idle)
    report.series += [idle, alone]
    report.ratios.append(kept)
    report.targets.append(Target(f"speed of {case}", kept.median(), _SPEED_KEPT, at_most=False, unit="share"))
