"""An operation over farandole and over gloo, on the same ranks, at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from farandole.bench._peers import measure_peers, on_ranks, usual_count
from farandole.bench._ranks import Ranks
from farandole.bench._series import Report, Sample, Target, ratio
from farandole.bench._settings import Settings

_BACKENDS = ["farandole", "gloo"]


def measure_beside_gloo(
    report: Report,
    settings: Settings,
    ranks: Ranks,
    function: Callable[..., list[Sample]],
    sizes: Sequence[int],
    targets: Mapping[int, float],
    case: str = "{}",
    count: Callable[[int], int] = usual_count,
) -> Report:
    """Adds series and ratios for every size to the report, and targets for some: times faster than gloo, at least.

    ``function(rank, backend, size, warm_up, count, samples)`` runs on all ranks; the slowest one counts. A row is
    named by ``case``, with the size for its braces; ``count`` is as for ``measure_peers``.
    """
    peers = {backend: on_ranks(ranks, function, backend=backend) for backend in _BACKENDS}
    for size, series in measure_peers(report, settings, peers, sizes, case=case, count=count).items():
        above_gloo = ratio("gloo / farandole", series["gloo"], series["farandole"])
        report.ratios.append(above_gloo)
        if size in targets:
            name = f"{report.subject}, {above_gloo.case}, times faster than gloo"
            report.targets.append(Target(name, above_gloo.median(), targets[size], at_most=False))
    return report
