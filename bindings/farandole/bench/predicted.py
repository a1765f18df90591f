"""Steps of every schedule on two ranks beside what was predicted of them.

Stages are transformer layers (d=256, 64 tokens, microbatches of 2 rows). In each round every other step is profiled; the
prediction is the step simulated with the medians of their F, B, I and W by stage and messages that take no time; the
steps between them are what is measured. (In steps one after another the machine is what differs: it may have become
slower by several percent, which no plan predicts.) DualPipe runs two copies of a model of two stages.
"""

from __future__ import annotations

import statistics

from farandole import _C, pipelining
from farandole.bench._pipeline_rank import MICROBATCHES, Case, Step, run_steps
from farandole.bench._ranks import RANKS, RankPair
from farandole.bench._series import Measurement, Report, Sample, Series, Target, interleave
from farandole.bench._settings import Settings
from farandole.bench.schedules import STAGES_PER_RANK

_STAGES_PER_RANK = STAGES_PER_RANK | {"LoopedBFS": 2, "DualPipe": 2}
_WIDTH = 256
_TOLERANCE = 0.1
_STEPS = 3  # per round, in turns with as many that are profiled
_WARM_UP = 1


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report(
        "predicted",
        f"a step on {RANKS} ranks, {MICROBATCHES} microbatches, beside the one simulated from a profile of others",
        peers_as_rows=True,
    )
    for name, per_rank in _STAGES_PER_RANK.items():
        series = [Series("step", name), Series("step", name, "predicted"), Series("step", name, "ratio", "ratio")]
        case = Case(name, "", per_rank)
        interleave(settings.rounds, [_measurement(settings, pair, case, series)], settings.tick)
        report.series += series
        ratio = series[2].median()
        report.targets.append(Target(f"{name}, step / predicted", ratio, 1 + _TOLERANCE, at_most=True))
        report.targets.append(Target(f"{name}, step / predicted", ratio, 1 - _TOLERANCE, at_most=False))
    return report


def _measurement(settings: Settings, pair: RankPair, case: Case, series: list[Series]) -> Measurement:
    plan = case.plan()

    def one_round() -> list[list[Sample]]:
        count = settings.count(_STEPS)
        ranks = pair.call(run_steps, peer="farandole", case=case, width=_WIDTH, warm_up=_WARM_UP, count=2 * count)
        steps = list(zip(*ranks, strict=True))
        costs = pipelining.profile_costs(*(_timeline(list(step)) for step in steps[::2]))
        predicted = pipelining.simulate(plan, costs).makespan
        taken = statistics.median(max(r.end for r in step) - min(r.start for r in step) for step in steps[1::2])
        return [[Sample(value, value)] for value in (taken, predicted, taken / predicted)]

    return series, one_round


def _timeline(ranks: list[Step]) -> _C.SimulationResult:
    """One action after another: when they ran is of no interest to a profile."""
    timelines = []
    for rank in ranks:
        now, actions = 0.0, []
        for action, seconds in rank.durations.items():
            actions.append((action, now, now + seconds))
            now += seconds
        timelines.append(actions)
    return _C.measured_step(timelines)
