"""Small messages between two ranks, as of a pipeline, while a bucket of 64 MiB is all-reduced in the same group.

A message that had to wait for the whole bucket would take as long as that does. Times are round trips, "alone" and
"beside" an all_reduce that both ranks have started, and that of the "bucket" without messages; of the slower rank.
"""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist

from farandole.bench._ranks import Rank, RankPair
from farandole.bench._series import Report, Sample, Series, interleave, ratio
from farandole.bench._settings import Settings

_SIZE = 64 * 2**20
_ROUND_TRIPS = 20  # at once: they end before the bucket does, over farandole
_BUCKETS = 5
_PEERS = ["farandole", "gloo"]
_CASES = ["alone", "beside", "bucket"]


def round_trips(rank: Rank, backend: str, size: int, times: int, buckets: int) -> dict[str, list[float]]:
    """Runs on all ranks: seconds of each round trip, alone and beside, and of each bucket without messages."""
    group = rank.groups[backend]
    bucket, message = torch.zeros(size // 4), torch.zeros(2)
    taken: dict[str, list[float]] = {"alone": [], "beside": [], "bucket": []}
    for _ in range(buckets):
        begin = time.perf_counter()
        dist.all_reduce(bucket, group=group)
        taken["bucket"].append(time.perf_counter() - begin)
        taken["alone"] += _ping(rank, message, group, times)
        work = dist.all_reduce(bucket, group=group, async_op=True)
        taken["beside"] += _ping(rank, message, group, times)
        work.wait()
    return taken


def _ping(rank: Rank, message: torch.Tensor, group: dist.ProcessGroup, times: int) -> list[float]:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        if rank.rank == 0:
            dist.send(message, 1, group=group)
            dist.recv(message, 1, group=group)
        else:
            dist.recv(message, 0, group=group)
            dist.send(message, 0, group=group)
        taken.append(time.perf_counter() - begin)
    return taken


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("beside_bucket", "8 bytes there and back, beside an all_reduce of 64 MiB over 2 processes")
    series = {peer: {case: Series(case, peer, quantity="time") for case in _CASES} for peer in _PEERS}

    def one_round(peer: str) -> list[list[Sample]]:
        count = settings.count(_BUCKETS)
        ranks = pair.call(round_trips, backend=peer, size=_SIZE, times=_ROUND_TRIPS, buckets=count)
        slower = ([max(pair) for pair in zip(*(of[case] for of in ranks), strict=True)] for case in _CASES)
        return [[Sample(value, value) for value in of_case] for of_case in slower]

    interleave(
        settings.rounds, [(list(series[peer].values()), partial(one_round, peer)) for peer in _PEERS], settings.tick
    )
    for peer in _PEERS:
        report.series += series[peer].values()
        report.ratios.append(ratio("beside / alone", series[peer]["beside"], series[peer]["alone"]))
        report.ratios.append(ratio("beside / bucket", series[peer]["beside"], series[peer]["bucket"]))
    return report
