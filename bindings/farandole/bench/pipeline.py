"""Steps of farandole beside torch.distributed.pipelining's over gloo, and both beside the ideal.

1F1B with one stage on each of two ranks, and interleaved 1F1B with two; a stage is one transformer layer; 16
microbatches of 2 rows of 64 tokens. The ideal of a step
is the makespan of the plan, simulated with that step's own durations of F and B (as they are with
both cores loaded) and with messages that take no time. Durations are what the schedule itself runs as F and B: farandole's
from its trace, torch's around ``forward_one_chunk`` and ``backward_one_chunk`` with the loss. So
what a schedule does around the module inside F and B counts as work in its own ideal; the ratio of
the steps themselves shows it.
"""

from __future__ import annotations

import math

from farandole import pipelining
from farandole.bench import _pipeline_rank
from farandole.bench._pipeline_rank import MICROBATCHES, Case, Step, run_steps
from farandole.bench._ranks import RANKS, RankPair
from farandole.bench._series import Measurement, Report, Sample, Series, Target, interleave, ratio
from farandole.bench._settings import Settings

_CASES = [Case("1F1B", "Schedule1F1B", 1), Case("Interleaved1F1B", "ScheduleInterleaved1F1B", 2)]
_LIMITS = {256: 1.03, 32: 1.15}  # of step / ideal, by width
_PEERS = {"farandole": "farandole", "torch": "torch over gloo"}
_QUANTITIES = ["step", "ideal", "step / ideal"]
_STEPS = 4  # per round
_WARM_UP = 2


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report(
        "pipeline",
        f"a step on {RANKS} ranks, {MICROBATCHES} microbatches of {_pipeline_rank.MICROBATCH} x "
        f"{_pipeline_rank.SEQUENCE} tokens",
    )
    for case in _CASES:
        for width, limit in _LIMITS.items():
            losses: dict[str, list[float]] = {}
            series = {peer: _series_of(case, width, label) for peer, label in _PEERS.items()}
            interleave(
                settings.rounds,
                [_measurement(settings, pair, case, width, peer, of_peer, losses) for peer, of_peer in series.items()],
                settings.tick,
            )
            ours, theirs = series["farandole"], series["torch"]
            report.series += ours + theirs
            report.ratios.append(ratio("step / farandole's", theirs[0], ours[0]))
            name = f"{case.schedule} step at d={width} / ideal"
            report.targets.append(Target(name, ours[2].median(), limit, at_most=True))
    return report


def _series_of(case: Case, width: int, label: str) -> list[Series]:
    return [
        Series(f"{case.schedule}, d={width}", label, quantity=quantity, unit="ratio" if "/" in quantity else "s")
        for quantity in _QUANTITIES
    ]


def _measurement(
    settings: Settings,
    pair: RankPair,
    case: Case,
    width: int,
    peer: str,
    series: list[Series],
    losses: dict[str, list[float]],
) -> Measurement:
    plan = case.plan()

    def one_round() -> list[list[Sample]]:
        count = settings.count(_STEPS)
        ranks = pair.call(run_steps, peer=peer, case=case, width=width, warm_up=_WARM_UP, count=count)
        losses[peer] = next(steps[-1].losses for steps in ranks if steps[-1].losses)
        _check_losses(f"{case.schedule}, d={width}", losses)
        figures = [_figures(plan, list(steps)) for steps in zip(*ranks, strict=True)]
        return [[Sample(value, value) for value in values] for values in zip(*figures, strict=True)]

    return series, one_round


def _figures(plan: pipelining.Plan, ranks: list[Step]) -> list[float]:
    """One step's value of each quantity."""
    step = max(rank.end for rank in ranks) - min(rank.start for rank in ranks)
    durations = {action: seconds for rank in ranks for action, seconds in rank.durations.items()}
    ideal = pipelining.simulate(plan, durations).makespan
    return [step, ideal, step / ideal]


def _check_losses(case: str, losses: dict[str, list[float]]) -> None:
    for peer, values in losses.items():
        expected = losses["farandole"]
        close = [math.isclose(a, b, rel_tol=1e-5) for a, b in zip(values, expected, strict=False)]
        if len(values) != MICROBATCHES or not all(close):
            raise RuntimeError(
                f"{case}: the losses of {peer} are {values}; expected {MICROBATCHES}, those of farandole: {expected}"
            )
