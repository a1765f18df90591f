"""CUDA tensors beside torch's ProcessGroupNCCL: what a call takes of the host, and of the device.

The host's time is that of issuing an operation with ``async_op``, many in a row, with nothing waited for between them.
The device's time is taken by CUDA events around many operations, which a kernel that only waits holds back until all
are issued: so it has none of the host's time in it. Both backends use the NCCL that torch has loaded.

With one GPU there is one rank, which moves to itself what a batch sends, and two that share the GPU where NCCL can be
had to do that: their figures say something about farandole beside torch, and nothing about NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from farandole.bench._gpus import Placement, several_ranks, sleep_cycles, why_no_gpu
from farandole.bench._peers import slowest
from farandole.bench._ranks import Rank, RankPair, Ranks
from farandole.bench._series import Report, Sample, Series, Skipped, Target, interleave, ratio, size_name
from farandole.bench._settings import Settings

BACKENDS = ["farandole", "nccl"]
_SIZES = [8, 4 * 2**10, 2**20, 64 * 2**20]
_SAMPLES = 3
_LIMITS = {"host": 0.8, "device": 1.0}
_HELD_BACK = 0.02  # seconds; issuing takes less

Issue = Callable[[], Sequence[Any]]


def prepare(rank: Rank, operation: str, backend: str, size: int) -> Issue:
    """A function that issues the operation once and returns its Works; its result has been checked."""
    group = rank.groups[backend]
    if operation == "all_reduce":
        tensor = torch.full((size // 4,), float(rank.rank + 1), device="cuda")
        dist.all_reduce(tensor, group=group)
        _check(operation, tensor, sum(range(1, rank.size + 1)))
        tensor.zero_()  # stays what it is however often it is summed
        return lambda: [dist.all_reduce(tensor, group=group, async_op=True)]
    outgoing = torch.full((size // 4,), float(rank.rank + 1), device="cuda")
    incoming = torch.zeros_like(outgoing)
    following, previous = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size

    def exchange() -> Sequence[Any]:
        ops = [
            dist.P2POp(dist.isend, outgoing, following, group),
            dist.P2POp(dist.irecv, incoming, previous, group),
        ]
        return dist.batch_isend_irecv(ops)

    def pass_on() -> Sequence[Any]:
        if rank.rank == 0:
            return [dist.isend(outgoing, 1, group)]
        return [dist.irecv(incoming, 0, group)] if rank.rank == 1 else []

    issue = {"batch": exchange, "send": pass_on}[operation]
    _finish(issue())
    if operation == "batch" or rank.rank == 1:
        _check(operation, incoming, previous + 1)
    return issue


def run_often(rank: Rank, operation: str, backend: str, size: int, count: int, samples: int) -> list[list[Sample]]:
    """Runs on all ranks: the host's samples and the device's, in seconds of one operation."""
    key = (operation, backend, size)
    if key not in rank.state:
        rank.state[key] = prepare(rank, operation, backend, size)
        for _ in range(3):
            _finish(rank.state[key]())
    issue = rank.state[key]
    cycles = _cycles(rank)
    host, device = [], []
    for _ in range(samples):
        host.append(_host_time(issue, count))
        device.append(_device_time(issue, count, cycles))
    return [host, device]


def _finish(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
    torch.cuda.synchronize()


def _host_time(issue: Issue, count: int) -> Sample:
    pending: list[Any] = []
    ends = [perf_counter()]
    for _ in range(count):
        pending += issue()
        ends.append(perf_counter())
    _finish(pending)
    taken = sorted(end - start for start, end in zip(ends, ends[1:], strict=False))
    return Sample(taken[len(taken) // 2], (ends[-1] - ends[0]) / count)


def _device_time(issue: Issue, count: int, cycles: int) -> Sample:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)
    start.record()
    for _ in range(count):
        for work in issue():
            work.wait()
    end.record()
    end.synchronize()
    seconds = start.elapsed_time(end) / 1e3 / count
    return Sample(seconds, seconds)


def _cycles(rank: Rank) -> int:
    """Of the waiting kernel, measured once."""
    if "cycles" not in rank.state:
        rank.state["cycles"] = sleep_cycles(_HELD_BACK)
    return rank.state["cycles"]


def forget(rank: Rank) -> None:
    """Runs on all ranks: frees what was prepared."""
    rank.state.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def measure(settings: Settings, pair: RankPair) -> Report:
    if (reason := why_no_gpu()) is not None:
        raise Skipped(reason)
    device, nccl = torch.cuda.get_device_name(0), ".".join(map(str, torch.cuda.nccl.version()))
    report = Report("cuda", f"CUDA tensors beside ProcessGroupNCCL, Python; {device}, NCCL {nccl}")
    _measure_on(Placement(1), ["all_reduce", "batch"], report, settings)
    if isinstance(placement := several_ranks(), str):
        report.notes.append(f"Several ranks are not measured: {placement}")
    else:
        _measure_on(placement, ["all_reduce", "batch", "send"], report, settings)
    return report


def _measure_on(placement: Placement, operations: Sequence[str], report: Report, settings: Settings) -> None:
    with Ranks(placement.size, BACKENDS, enter=placement.enter) as ranks:
        for operation in operations:
            for size in _SIZES:
                case = f"{operation}, {placement}, {size_name(size)}"
                series = {backend: [Series(case, backend, quantity) for quantity in _LIMITS] for backend in BACKENDS}
                runs = settings.count(max(10, min(100, 2**26 // size)))
                interleave(
                    settings.rounds,
                    [(series[backend], partial(_turn, ranks, operation, backend, size, runs)) for backend in BACKENDS],
                    settings.tick,
                )
                ranks.call(forget)
                _compare(report, case, series)


def _turn(ranks: Ranks, operation: str, backend: str, size: int, count: int) -> list[list[Sample]]:
    by_rank = ranks.call(run_often, operation=operation, backend=backend, size=size, count=count, samples=_SAMPLES)
    return [slowest(quantity) for quantity in zip(*by_rank, strict=True)]


def _compare(report: Report, case: str, series: dict[str, list[Series]]) -> None:
    for ours, theirs in zip(*(series[backend] for backend in BACKENDS), strict=True):
        beside = ratio(f"{ours.quantity} / NCCL's", ours, theirs)
        report.ratios.append(beside)
        name = f"{case}: {ours.quantity} / NCCL's"
        report.targets.append(Target(name, beside.median(), _LIMITS[ours.quantity], at_most=True))
    for backend in BACKENDS:
        report.series += series[backend]


def _check(operation: str, tensor: torch.Tensor, value: float) -> None:
    if not torch.equal(tensor, torch.full_like(tensor, value)):
        raise RuntimeError(f"{operation}: got {tensor[:4].tolist()}..., expected {value} all over it")
