"""Steps of the sparse train pipeline on two ranks, beside a plain loop over the same backend and torchrec's pipeline over
gloo; and of one whose loader, input_dist and forward sleep, beside the longest stage of a plain loop over them, in
turns with it, and beside what these are told to sleep, which no machine does to the microsecond.
"""

from __future__ import annotations

import contextlib
import itertools

from farandole.bench import _sparse_rank as on_rank
from farandole.bench import _sparse_sleeping_rank as sleeping
from farandole.bench._ranks import RANKS, RankPair, Ranks
from farandole.bench._series import Measurement, Report, Sample, Series, Target, interleave, ratio
from farandole.bench._settings import Settings
from farandole.sparse._requirements import torchrec_reason

# Samples of a batch, and modules that run ahead.
_CASES = {
    "16 samples": (16, 0),
    "256 samples": (256, 0),
    "256 samples, a module ahead": (256, 1),
    "2048 samples": (2048, 0),
}
_BLOCKS, _STEPS = 6, 15  # of each peer per round, in turns
_WARM_UP = 64  # in which a pipeline compares its threads
_BLOCK_WARM_UP = 3  # after other peers have had the caches
_SECONDS = {"10 ms": 0.01, "50 ms": 0.05}  # of a stage that sleeps
_SLEEPING_STEPS = 12  # per round
_LONGEST_STAGE = 1.03  # most that a step may take of it
_OF_PLAIN = 1.02  # most that a step may take of the plain loop's
_OF_TORCHREC = 1 / 1.10  # and of torchrec's


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("sparse", f"a step of a sparse train pipeline on {RANKS} ranks")
    _measure_sleeping(settings, pair, report)
    reason = torchrec_reason()
    if reason is not None:
        report.notes.append(f"without torchrec: {reason}")
        return report
    series = {case: [Series(case, peer, quantity="step") for peer in on_rank.PEERS] for case in _CASES}
    interleave(settings.rounds, [_in_fresh_processes(settings, series)], settings.tick)
    for case, (plain, ours, torchrec) in series.items():
        report.series += (plain, ours, torchrec)
        for other, limit in ((plain, _OF_PLAIN), (torchrec, _OF_TORCHREC)):
            compared = ratio(f"step / that of {other.peer}", ours, other)
            report.ratios.append(compared)
            report.targets.append(Target(f"{case}: {compared.name}", compared.median(), limit, at_most=True))
    report.notes.append(
        "each round starts two processes for the plain loop, two for farandole and two for torchrec, which take turns of "
        f"{settings.count(_STEPS)} steps"
    )
    return report


def _in_fresh_processes(settings: Settings, series: dict[str, list[Series]]) -> Measurement:
    # A step differs by 5 % from one start to the next, and the rounds of one start agree on it. Each peer has processes of
    # its own, since in one their tables would lie in other places of it.
    orders = itertools.cycle(itertools.permutations(on_rank.PEERS))

    def one_round() -> list[list[Sample]]:
        order = next(orders)
        with contextlib.ExitStack() as stack:
            started = {peer: stack.enter_context(Ranks(RANKS, on_rank.BACKENDS)) for peer in order}
            blocks = {case: _in_turns(settings, started, *sizes) for case, sizes in _CASES.items()}
        return [blocks[one.case][one.peer] for one in itertools.chain.from_iterable(series.values())]

    return [*itertools.chain.from_iterable(series.values())], one_round


def _in_turns(settings: Settings, started: dict[str, Ranks], samples: int, ahead: int) -> dict[str, list[Sample]]:
    for peer, ranks in started.items():
        ranks.call(on_rank.begin, peer=peer, samples=samples, ahead=ahead, warm_up=_WARM_UP)
    blocks: dict[str, list[Sample]] = {peer: [] for peer in started}
    peers = [*started]
    for _ in range(_BLOCKS):
        for peer in peers:
            of_ranks = started[peer].call(on_rank.run_steps, warm_up=_BLOCK_WARM_UP, count=settings.count(_STEPS))
            blocks[peer].append(Sample(max(of_ranks), max(of_ranks)))
        peers.reverse()
    for ranks in started.values():
        ranks.call(on_rank.end)
    return blocks


def _measure_sleeping(settings: Settings, pair: RankPair, report: Report) -> None:
    for name, seconds in _SECONDS.items():
        case = f"stages sleep {name}"
        one = Series(case, "longest stage", quantity="time")
        threads = Series(case, "farandole, threads", quantity="step")
        interleave(settings.rounds, [_sleeping(settings, pair, seconds, [one, threads])], settings.tick)
        told = Series(case, "set duration", quantity="time", rounds=[[Sample(seconds, seconds)]] * settings.rounds)
        report.series += [told, one, threads]
        compared = ratio("step / longest stage", threads, one)
        report.ratios += [compared, ratio("step / set duration", threads, told)]
        report.targets.append(Target(f"{case}, threads", compared.median(), _LONGEST_STAGE, at_most=True))


def _sleeping(settings: Settings, pair: RankPair, seconds: float, series: list[Series]) -> Measurement:
    def one_round() -> list[list[Sample]]:
        count = settings.count(_SLEEPING_STEPS)
        measured = (sleeping.time_stages, sleeping.run_steps)
        values = [pair.call(each, seconds=seconds, warm_up=2, count=count) for each in measured]
        return [[Sample(max(both), max(both)) for both in zip(*ranks, strict=True)] for ranks in values]

    return series, one_round
