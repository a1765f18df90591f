"""What an action of a schedule costs beyond the module and the autograd engine, beside torch's runtime over gloo.

Stages are 8-wide linear layers on two ranks, 16 microbatches. The cost is (step - bare loop) / actions, of the rank where
it is larger; the bare loop makes the same calls of modules, loss and engine and nothing else. So waiting for the other
rank, the bubble, and what splitting a backward takes are all in it. Actions are counted in farandole's plan, for both.
"""

from __future__ import annotations

import statistics

from farandole.bench._actions_rank import CASES, time_steps
from farandole.bench._pipeline_rank import Case
from farandole.bench._ranks import RankPair
from farandole.bench._series import Measurement, Report, Sample, Series, interleave, ratio
from farandole.bench._settings import Settings

_PEERS = {"farandole": "farandole", "torch": "torch over gloo"}
_QUANTITIES = ["step", "per action"]
_STEPS = 20  # per round


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("actions", "what an action costs over the bare calls of modules and engine: 8-wide linear stages")
    for case in CASES:
        series = {
            peer: [Series(case.schedule, label, quantity) for quantity in _QUANTITIES] for peer, label in _PEERS.items()
        }
        interleave(
            settings.rounds,
            [_measurement(settings, pair, case, peer, of_peer) for peer, of_peer in series.items()],
            settings.tick,
        )
        report.series += series["farandole"] + series["torch"]
        report.ratios.append(ratio("per action / farandole's", series["torch"][1], series["farandole"][1]))
    return report


def _measurement(settings: Settings, pair: RankPair, case: Case, peer: str, series: list[Series]) -> Measurement:
    def one_round() -> list[list[Sample]]:
        ranks = pair.call(time_steps, peer=peer, case=case, count=settings.count(_STEPS))
        step = statistics.median(max(of_ranks) for of_ranks in zip(*(steps for steps, _, _ in ranks), strict=True))
        costs = [(statistics.median(steps) - statistics.median(bare)) / actions for steps, bare, actions in ranks]
        return [[Sample(step, step)], [Sample(max(costs), max(costs))]]

    one_round()  # shapes are learned, and the machine warms up
    return series, one_round
