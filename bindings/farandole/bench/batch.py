"""``dist.batch_isend_irecv`` in a ring of two processes, beside gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from farandole.bench._beside_gloo import measure_beside_gloo
from farandole.bench._ranks import RANKS, Rank, RankPair
from farandole.bench._series import Report, Sample
from farandole.bench._settings import Settings
from farandole.bench._timing import time_each

_SIZES = [8, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20]
_TARGETS = {8: 4.0, 2**20: 4.0, 16 * 2**20: 4.0}


def exchange_often(rank: Rank, backend: str, size: int, warm_up: int, count: int, samples: int) -> list[Sample]:
    """Runs on both ranks: everybody sends to the next rank and receives from the one before."""
    group = rank.groups[backend]
    following, previous = (rank.rank + 1) % RANKS, (rank.rank - 1) % RANKS
    outgoing = torch.full((size,), rank.rank + 1, dtype=torch.uint8)
    incoming = torch.zeros_like(outgoing)

    def operation() -> None:
        ops = [
            dist.P2POp(dist.isend, outgoing, following, group),
            dist.P2POp(dist.irecv, incoming, previous, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    for _ in range(1 + warm_up):
        operation()
    if not torch.equal(incoming, torch.full_like(incoming, previous + 1)):
        raise RuntimeError(f"{backend}: what rank {previous} sent, {size} bytes, is not what came")
    return time_each(operation, count, samples)


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("batch", "batch_isend_irecv in a ring of 2 processes, Python")
    return measure_beside_gloo(report, settings, pair, exchange_often, _SIZES, _TARGETS)
