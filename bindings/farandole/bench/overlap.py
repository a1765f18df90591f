"""A computing loop beside an asynchronous all_reduce of 64 MiB, on two ranks.

Each rank starts the operation, does a fixed work on its main thread that is longer than the operation and stays in the
cache of its core, and then waits for the operation. "loop" is the time of the work, "all" that until the operation is
done too, "CPU" what all threads of a process used meanwhile; of the slower rank. Both ranks begin together.

Two ranks on two cores have no core to spare: what the operation computes and copies is taken from the loop, whoever does
it, and "all" cannot be less than the loop alone and the CPU time of the operation. So the loop is not compared with
itself alone but with itself beside a thread that copies as many bytes from memory to memory, once ("memcpy"): each rank
of an all_reduce has to read and write at least that much (it sums one half and copies the other). "first" does the
all_reduce and then the loop, with nothing beside it: an operation that is asynchronous in name only takes that long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from farandole.bench._ranks import Rank, RankPair
from farandole.bench._series import Report, Sample, Series, Target, interleave, ratio
from farandole.bench._settings import Settings
from farandole.bench._work import multiply

_SIZE = 64 * 2**20
_WORK = 3000
_SAMPLES = 5
_QUANTITIES = ["loop", "all", "CPU"]
_PEERS = {
    "nothing": "nothing",
    "memcpy": "memcpy",
    "farandole": "farandole",
    "farandole first": "farandole, first",
    "gloo": "gloo",
}

Wait = Callable[[], Any]


def loop_beside(rank: Rank, what: str, size: int, work: int, samples: int) -> list[list[float]]:
    """Runs on all ranks; the quantities of each sample."""
    start = _starter(rank, what, size)
    start()()
    result = []
    for _ in range(samples):
        dist.barrier(rank.groups["farandole"])
        begin, cpu = time.perf_counter(), time.process_time()
        wait = start()
        begin_loop = time.perf_counter()
        multiply(work)
        end_loop = time.perf_counter()
        wait()
        result.append([end_loop - begin_loop, time.perf_counter() - begin, time.process_time() - cpu])
    return result


def _starter(rank: Rank, what: str, size: int) -> Callable[[], Wait]:
    """Starts what goes on beside the loop and returns what waits for it."""
    if what == "nothing":
        return lambda: lambda: None
    tensor = torch.zeros(size // 4)
    if what == "memcpy":
        threads = rank.state.setdefault("threads", ThreadPoolExecutor(1))
        source = torch.zeros_like(tensor)
        return lambda: threads.submit(tensor.copy_, source).result
    backend, _, first = what.partition(" ")
    group = rank.groups[backend]

    def start() -> Wait:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if first:
            work.wait()
        return work.wait

    return start


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("overlap", "A loop that computes, beside an asynchronous all_reduce of 64 MiB over 2 processes")
    series = {
        what: [Series("beside", label, quantity=quantity) for quantity in _QUANTITIES] for what, label in _PEERS.items()
    }

    def one_round(what: str) -> list[list[Sample]]:
        count = settings.count(_SAMPLES)
        ranks = pair.call(loop_beside, what=what, size=_SIZE, work=_WORK, samples=count)
        by_sample = [[max(values) for values in zip(*of_ranks, strict=True)] for of_ranks in zip(*ranks, strict=True)]
        return [[Sample(value, value) for value in values] for values in zip(*by_sample, strict=True)]

    interleave(settings.rounds, [(series[what], partial(one_round, what)) for what in _PEERS], settings.tick)
    for what in _PEERS:
        report.series += series[what]
        loop, everything, _ = series[what]
        report.ratios.append(ratio("loop / alone", loop, series["nothing"][0]))
        report.ratios.append(ratio("all / memcpy's", everything, series["memcpy"][1]))
    beside_memory = ratio("loop / beside memcpy", series["farandole"][0], series["memcpy"][0])
    report.ratios.append(beside_memory)
    # Single loops differ by some percent.
    report.targets.append(
        Target("overlap: a loop beside an all_reduce / beside memcpy", beside_memory.median(), 1.05, at_most=True)
    )
    return report
