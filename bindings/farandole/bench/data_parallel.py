"""What data parallelism adds to a backward that has no communication: torch's DDP beside farandole's, on two ranks.

"exposed" is the time of a forward and backward less that of the same module without a wrapper, in the same turn (where
backward sleeps other peers have turns of their own, whose "alone" is not shown). Two ranks on two cores hide nothing,
so what is exposed is compared with one all_reduce of as many elements ("all_reduce"); where backward sleeps, for set
times, cores are free, and communication can be hidden: the gradients, 16 MB of each stage, have been computed before the
clock starts. "hooks over fake" are hooks that start one all_reduce for each gradient there, over torch's backend that
moves nothing. farandole's wrapper has its defaults, but for the arguments that the report names.

"a parameter" is what the host takes for one beyond autograd's own work: parameters of one element whose
gradients are there, in a group of one rank. It is (backward - backward without a wrapper) / parameters.

"memory" is what torch holds for each element of a bfloat16 model that is trained with DistributedOptimizer and Adam, in
parts of Megatron's formulas: with d ranks 6 + 12 / d bytes with float32 gradients, 4 + 16 / d with bfloat16 ones.
"""

from __future__ import annotations

import statistics

from farandole.bench import _data_parallel_rank as on_rank
from farandole.bench._data_parallel_rank import ALONE, NOTHING, OPTIONS, OURS, RAW
from farandole.bench._hook_cost_rank import PARAMETERS, time_hooks
from farandole.bench._memory_rank import bytes_per_element
from farandole.bench._ranks import RANKS, RankPair
from farandole.bench._series import Measurement, Report, Sample, Series, Target, interleave, ratio
from farandole.bench._settings import Settings

_PEERS = [OURS, "torch over gloo", "torch over farandole"]
# By case: what is exposed is at most so much of that.
_LIMITS = {
    "transformer, 40M": {"torch's over gloo": 0.45, RAW: 1.15},
    "2000 parameters": {"torch's over gloo": 1 / 3, "torch's over farandole": 0.6},
    "sleeping": {RAW: 0.1},
}
_STEPS = {"transformer, 40M": 5, "2000 parameters": 10, "sleeping": 5}  # per round
# What is exposed there is a hundredth of a step, whose time varies by more: many steps, apart from other peers'.
_SLEEPING_STEPS = 25


_HOOK_PEERS = ["farandole", "torch over gloo"]
_HOOK_BACKWARDS = 50  # per round
_HOOK_LIMIT = 2e-6  # of a parameter
# By the type of gradients, whether that is float32, and by the formula: bytes for each element.
_MEMORY = {"float32 gradients": (True, 6 + 12 / RANKS), "bfloat16 gradients": (False, 4 + 16 / RANKS)}
_MEMORY_LIMIT = 1.03  # in parts of the formula


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("data_parallel", f"forward and backward on {RANKS} ranks, beyond the same without communication")
    for case, options in OPTIONS.items():
        given = ", ".join(f"{name}={value}" for name, value in options.items())
        report.notes.append(f"{case}: farandole's wrapper with {given}, elsewhere with its defaults")
    for case in on_rank.CASES:
        groups = [(_STEPS[case], _PEERS)]
        if case == "sleeping":
            groups = [(_SLEEPING_STEPS, [OURS]), (_STEPS[case], [*_PEERS[1:], NOTHING])]
        exposed = {peer: Series(case, peer, quantity="exposed") for _, peers in groups for peer in peers}
        steps = {peer: Series(case, peer, quantity="step") for peer in (ALONE, *exposed)}
        raw = Series(case, RAW, quantity="time")
        measurements = [
            _measurement(settings, pair, case, count, {peer: exposed[peer] for peer in peers}, steps, raw)
            for count, peers in groups
        ]
        interleave(settings.rounds, measurements, settings.tick)
        report.series += [*steps.values(), *exposed.values(), raw]
        ours = exposed[OURS]
        under = {
            "torch's over gloo": exposed["torch over gloo"],
            "torch's over farandole": exposed["torch over farandole"],
        }
        for name, limit in _LIMITS[case].items():
            compared = ratio(f"exposed / {name}", ours, under.get(name, raw))
            report.ratios.append(compared)
            report.targets.append(Target(f"{case}: {compared.name}", compared.median(), limit, at_most=True))
    hooks = {peer: Series("a parameter", peer, quantity="exposed") for peer in _HOOK_PEERS}
    interleave(settings.rounds, [_hook_measurement(settings, pair, hooks)], settings.tick)
    report.series += hooks.values()
    report.ratios.append(ratio("exposed / torch's over gloo", hooks["farandole"], hooks["torch over gloo"]))
    measured = hooks["farandole"].median()
    report.targets.append(Target("host cost per parameter", measured, _HOOK_LIMIT, at_most=True, unit="s"))
    for grads, (in_fp32, formula) in _MEMORY.items():
        held = max(pair.call(bytes_per_element, grads_in_fp32=in_fp32))
        report.notes.append(f"memory, {grads}: {held:.3g} bytes for each element, by the formula {formula:.3g}")
        report.targets.append(Target(f"memory, {grads}: bytes / formula", held / formula, _MEMORY_LIMIT, at_most=True))
    return report


def _hook_measurement(settings: Settings, pair: RankPair, hooks: dict[str, Series]) -> Measurement:
    def one_round() -> list[list[Sample]]:
        ranks = pair.call(time_hooks, peers=[ALONE, *hooks], count=settings.count(_HOOK_BACKWARDS))
        return [[_per_parameter(ranks, peer)] for peer in hooks]

    return [*hooks.values()], one_round


def _per_parameter(ranks: list[dict[str, list[float]]], peer: str) -> Sample:
    """Of the rank where it is larger; of each backward and the one without a wrapper in its turn."""
    cost = max(
        statistics.median(with_it - alone for with_it, alone in zip(of_rank[peer], of_rank[ALONE], strict=True))
        for of_rank in ranks
    )
    return Sample(cost / PARAMETERS, cost / PARAMETERS)


def _measurement(
    settings: Settings,
    pair: RankPair,
    case: str,
    count: int,
    exposed: dict[str, Series],
    steps: dict[str, Series],
    raw: Series,
) -> Measurement:
    """The series of the module alone and of one all_reduce are filled where ours is."""
    told = [*([ALONE] if OURS in exposed else []), *exposed]
    with_raw = [RAW] if OURS in exposed else []
    peers = [ALONE, *exposed, *with_raw]

    def one_round() -> list[list[Sample]]:
        ranks = pair.call(on_rank.time_backwards, case=case, peers=peers, count=settings.count(count))
        slower = {
            peer: [max(pair) for pair in zip(*(of_rank[peer] for of_rank in ranks), strict=True)] for peer in peers
        }
        beyond = {
            peer: [step - alone for step, alone in zip(slower[peer], slower[ALONE], strict=True)] for peer in exposed
        }
        values = [*beyond.values(), *(slower[peer] for peer in [*told, *with_raw])]
        return [[Sample(value, value) for value in of_series] for of_series in values]

    return [*exposed.values(), *(steps[peer] for peer in told), *(raw for _ in with_raw)], one_round
