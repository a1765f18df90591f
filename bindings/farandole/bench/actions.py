"""What an action of a schedule costs beyond the module and the autograd engine, beside torch's runtime over gloo.

Stages are 8-wide linear layers on two ranks, 16 microbatches. The cost is (step - bare loop) / actions, of the rank where
it is larger; the bare loop makes the same calls of modules, loss and engine and nothing else. So waiting for the other
rank, the bubble, and what splitting a backward takes are all in it. Actions are counted in farandole's plan, for both.

"Other shapes each step": rows of a microbatch alternate, so that each step learns its shapes anew. torch's stages have
one shape.

"without waiting" is the same of farandole's executor over a group that posts nothing: each rank runs by itself. What is
left is the executor's own cost; the bare loop calls the engine twice for a backward that is split.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable

import torch

from farandole import pipelining
from farandole.bench._actions_rank import CASES, time_steps
from farandole.bench._host_cost_rank import time_host
from farandole.bench._pipeline_rank import Case
from farandole.bench._ranks import RankPair
from farandole.bench._series import Measurement, Report, Sample, Series, Target, interleave, ratio
from farandole.bench._settings import Settings

_PEERS = {"farandole": "farandole", "learning": "farandole, other shapes each step", "torch": "torch over gloo"}
_QUANTITIES = ["step", "per action"]
_STEPS = 20  # per round
_LIMIT = 5e-6  # of an action, without waiting
_NODE_LIMIT = 0.5e-6  # more for each node of the graph in an I or W, of which a linear layer has four


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("actions", "what an action costs over the bare calls of modules and engine: 8-wide linear stages")
    for case in CASES:
        peers = dict(_PEERS)
        if case.schedule == "ZBV" and torch.__version__.startswith("2.11."):
            del peers["torch"]
            report.notes.append("torch 2.11 sends to itself in a V, which gloo refuses: not measured")
        series = {
            peer: [Series(case.schedule, label, quantity) for quantity in _QUANTITIES] for peer, label in peers.items()
        }
        interleave(
            settings.rounds,
            [_measurement(settings, pair, case, peer, of_peer) for peer, of_peer in series.items()],
            settings.tick,
        )
        report.series += [one for of_peer in series.values() for one in of_peer]
        report.ratios.append(ratio("per action / farandole's", series["learning"][1], series["farandole"][1]))
        if "torch" in series:
            report.ratios.append(ratio("per action / farandole's", series["torch"][1], series["farandole"][1]))
        alone = Series(case.schedule, "farandole, without waiting", "per action")
        interleave(settings.rounds, [([alone], _without_waiting(settings, pair, case))], settings.tick)
        report.series.append(alone)
        name = f"{case.schedule} per action, without waiting"
        report.targets.append(Target(name, alone.median(), _limit(case), at_most=True, unit="s"))
    return report


def _measurement(settings: Settings, pair: RankPair, case: Case, peer: str, series: list[Series]) -> Measurement:
    def one_round() -> list[list[Sample]]:
        ranks = pair.call(time_steps, peer=peer, case=case, count=settings.count(_STEPS))
        step = statistics.median(max(of_ranks) for of_ranks in zip(*(steps for steps, _, _ in ranks), strict=True))
        return [[Sample(step, step)], [_per_action(ranks)]]

    one_round()  # shapes are learned, and the machine warms up
    return series, one_round


def _without_waiting(settings: Settings, pair: RankPair, case: Case) -> Callable[[], list[list[Sample]]]:
    def one_round() -> list[list[Sample]]:
        return [[_per_action(pair.call(time_host, case=case, count=settings.count(_STEPS)))]]

    one_round()
    return one_round


def _limit(case: Case) -> float:
    actions = [action for rank in pipelining.lower(case.plan()).actions for action in rank]
    halves = sum(bool(re.fullmatch(r"\d+[IW]\d+", action)) for action in actions)
    return _LIMIT + 4 * _NODE_LIMIT * halves / len(actions)


def _per_action(ranks: list[tuple[list[float], list[float], int]]) -> Sample:
    """Of the rank where it is larger."""
    cost = max((statistics.median(steps) - statistics.median(bare)) / actions for steps, bare, actions in ranks)
    return Sample(cost, cost)
