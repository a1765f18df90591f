"""All schedules on four ranks whose stages sleep for set times, so that cores do not limit: measured beside simulated.

A stage sleeps in its forward, in the gradient of its inputs and in that of its weights, each for the same time; where a
rank has two stages, each for half of it. The first stage has no gradient of inputs to compute. A sleep is longer than
it was asked to be: each round measures by how much, on all ranks at once. The prediction is the simulated step with
sleeps as long as that, and messages that take no time.
"""

from __future__ import annotations

import statistics

from farandole import pipelining
from farandole.bench._ranks import RankPair, Ranks
from farandole.bench._series import Report, Sample, Series, Target, interleave, ratio
from farandole.bench._settings import Settings
from farandole.bench._sleeping_rank import run_steps, sleep_often

_RANKS = 4
_MICROBATCHES = 12
SECONDS = 0.01  # of F, I and W each, on a rank
STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "ZB-H1": 1,
    "ZB-H2": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBV": 2,
    "V-Half": 2,
    "V-Min": 2,
    "DualPipeV": 2,
}
_AHEAD = ("ZB-H1", "ZBV")  # of 1F1B, by what their formulas say
_TOLERANCE = 1.1  # of the step
_SPEED_UP_TOLERANCE = 0.95
_STEPS = 3  # per round
_SLEEPS = 20


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report(
        "schedules",
        f"a step on {_RANKS} ranks, {_MICROBATCHES} microbatches, stages that sleep: F, I and W "
        f"{SECONDS * 1e3:.0f} ms each on a rank",
        peers_as_rows=True,
    )
    series: dict[str, list[Series]] = {}
    with Ranks(_RANKS, ("farandole",)) as ranks:
        measurements = []
        for name, per_rank in STAGES_PER_RANK.items():
            plan = plan_of(name)
            series[name] = [
                Series("step", name),
                Series("step", name, "simulated"),
                Series("step", name, "ratio", "ratio"),
            ]

            def one_round(
                name: str = name, plan: pipelining.Plan = plan, seconds: float = SECONDS / per_rank
            ) -> list[list[Sample]]:
                taken = ranks.call(
                    run_steps, name=name, plan=plan.to_csv(), seconds=seconds, count=settings.count(_STEPS)
                )
                slept = statistics.mean(ranks.call(sleep_often, seconds=seconds, count=_SLEEPS))
                predicted = predict(plan, slept)
                steps = [_from_first_to_last(of_step) for of_step in zip(*taken, strict=True)]
                values = [(step, predicted, step / predicted) for step in steps]
                return [[Sample(value, value) for value in column] for column in zip(*values, strict=True)]

            measurements.append((series[name], one_round))
        interleave(settings.rounds, measurements, settings.tick)
    for name, of_name in series.items():
        report.series += of_name
        report.targets.append(Target(f"{name}, step / simulated", of_name[2].median(), _TOLERANCE, at_most=True))
    for name in _AHEAD:
        measured = ratio(f"1F1B / {name}", series["1F1B"][0], series[name][0])
        simulated = ratio(f"1F1B / {name}, simulated", series["1F1B"][1], series[name][1])
        report.ratios += [measured, simulated]
        kept = measured.median() / simulated.median()
        report.targets.append(Target(f"1F1B / {name}, measured / simulated", kept, _SPEED_UP_TOLERANCE, at_most=False))
    return report


def plan_of(name: str) -> pipelining.Plan:
    return pipelining.plan(name, STAGES_PER_RANK[name] * _RANKS, _MICROBATCHES, num_ranks=_RANKS)


def _from_first_to_last(ranks: tuple[tuple[float, float], ...]) -> float:
    return max(end for _, end in ranks) - min(start for start, _ in ranks)


def predict(plan: pipelining.Plan, seconds: float) -> float:
    """The step if F, I and W of each stage take so many seconds."""
    first = (seconds, seconds, 0.0, seconds)
    others = (seconds, 2 * seconds, seconds, seconds)
    return pipelining.simulate(plan, [first] + [others] * (plan.num_stages - 1)).makespan
