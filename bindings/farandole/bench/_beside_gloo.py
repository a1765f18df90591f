"""An operation of two processes over farandole and over gloo, at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from farandole.bench._ranks import RankPair
from farandole.bench._series import Report, Sample, Series, Target, interleave, ratio, size_name
from farandole.bench._settings import Settings

_SAMPLES = 3
_BACKENDS = ["farandole", "gloo"]


def measure_beside_gloo(
    report: Report,
    settings: Settings,
    pair: RankPair,
    function: Callable[..., list[Sample]],
    sizes: Sequence[int],
    targets: Mapping[int, float],
) -> Report:
    """Adds series and ratios for every size to the report, and targets for some: times faster than gloo, at least.

    ``function(rank, backend, size, warm_up, count, samples)`` runs on both ranks; the slower one counts.
    """

    def slowest(backend: str, size: int, count: int) -> list[list[Sample]]:
        warm_up = max(1, count // 10)
        ranks = pair.call(function, backend=backend, size=size, warm_up=warm_up, count=count, samples=_SAMPLES)
        return [[max(samples) for samples in zip(*ranks, strict=True)]]

    for size in sizes:
        count = settings.count(max(4, min(400, 2**24 // size)))
        series = [Series(size_name(size), backend) for backend in _BACKENDS]
        interleave(
            settings.rounds,
            [([one], partial(slowest, one.peer, size, count)) for one in series],
            settings.tick,
        )
        above_gloo = ratio("gloo / farandole", series[1], series[0])
        report.series += series
        report.ratios.append(above_gloo)
        if size in targets:
            name = f"{report.subject} of {size_name(size)}, times faster than gloo"
            report.targets.append(Target(name, above_gloo.median(), targets[size], at_most=False))
    return report
