"""A 1F1B step of farandole beside torch.distributed.pipelining's over gloo, and both beside the ideal.

Two stages, each one transformer layer; 16 microbatches of 2 rows of 64 tokens. The ideal of a step
is the makespan of the plan, simulated with that step's own durations of F and B (as they are with
both cores loaded) and with messages that take no time. Cruder, (1 + (p - 1) / m) x compute, with
the compute of the busier stage. Durations are what the schedule itself runs as F and B: farandole's
from its trace, torch's around ``forward_one_chunk`` and ``backward_one_chunk`` with the loss. So
what a schedule does around the module inside F and B counts as work in its own ideal; the ratio of
the steps themselves shows it.
"""

from __future__ import annotations

import math

from farandole import pipelining
from farandole.bench import _pipeline_rank
from farandole.bench._pipeline_rank import MICROBATCHES, Step, run_steps
from farandole.bench._ranks import RANKS, RankPair
from farandole.bench._series import Measurement, Report, Sample, Series, Target, interleave, ratio
from farandole.bench._settings import Settings

_WIDTHS = [256, 32]
_PEERS = {"farandole": "farandole", "torch": "torch over gloo"}
_QUANTITIES = ["step", "ideal", "step / ideal", "step / (1+(p-1)/m) x compute"]
_STEPS = 4  # per round
_WARM_UP = 2
_PLAN = pipelining.plan("1F1B", RANKS, MICROBATCHES)


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report(
        "pipeline",
        f"1F1B step, {RANKS} stages, {MICROBATCHES} microbatches of {_pipeline_rank.MICROBATCH} x "
        f"{_pipeline_rank.SEQUENCE} tokens",
    )
    by_case: dict[int, dict[str, list[Series]]] = {}
    for width in _WIDTHS:
        losses: dict[str, list[float]] = {}
        by_case[width] = {peer: _series_of(width, label) for peer, label in _PEERS.items()}
        interleave(
            settings.rounds,
            [_measurement(settings, pair, width, peer, series, losses) for peer, series in by_case[width].items()],
            settings.tick,
        )
        ours, theirs = by_case[width]["farandole"], by_case[width]["torch"]
        report.series += ours + theirs
        report.ratios.append(ratio("step / farandole's", theirs[0], ours[0]))
    report.targets = [
        Target("1F1B step at d=256 / ideal", by_case[256]["farandole"][2].median(), 1.05, at_most=True),
    ]
    return report


def _series_of(width: int, label: str) -> list[Series]:
    return [
        Series(f"d={width}", label, quantity=quantity, unit="ratio" if "/" in quantity else "s")
        for quantity in _QUANTITIES
    ]


def _measurement(
    settings: Settings, pair: RankPair, width: int, peer: str, series: list[Series], losses: dict[str, list[float]]
) -> Measurement:
    def one_round() -> list[list[Sample]]:
        ranks = pair.call(run_steps, peer=peer, width=width, warm_up=_WARM_UP, count=settings.count(_STEPS))
        losses[peer] = ranks[-1][-1].losses
        _check_losses(width, losses)
        figures = [_figures(list(steps)) for steps in zip(*ranks, strict=True)]
        return [[Sample(value, value) for value in values] for values in zip(*figures, strict=True)]

    return series, one_round


def _figures(ranks: list[Step]) -> list[float]:
    """One step's value of each quantity."""
    step = max(rank.end for rank in ranks) - min(rank.start for rank in ranks)
    durations = {action: seconds for rank in ranks for action, seconds in rank.durations.items()}
    ideal = pipelining.simulate(_PLAN, durations).makespan
    compute = max(sum(rank.durations.values()) for rank in ranks)
    return [step, ideal, step / ideal, step / ((1 + (RANKS - 1) / MICROBATCHES) * compute)]


def _check_losses(width: int, losses: dict[str, list[float]]) -> None:
    for peer, values in losses.items():
        expected = losses["farandole"]
        close = [math.isclose(a, b, rel_tol=1e-5) for a, b in zip(values, expected, strict=False)]
        if len(values) != MICROBATCHES or not all(close):
            raise RuntimeError(
                f"d={width}: the losses of {peer} are {values}; expected {MICROBATCHES}, those of farandole: {expected}"
            )
