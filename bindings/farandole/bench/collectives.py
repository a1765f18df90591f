"""Collectives of float32 over two processes, from Python, beside gloo and Intel MPI.

The size is that of the larger side: all ranks' together for what all_gather_into_tensor puts out and for what
reduce_scatter_tensor takes in. all_reduce is in place; the others have an input and an output.

Intel MPI's ranks are processes of their own, pinned to cores as it does by default, with numpy arrays and mpi4py. All
peers' memory has pages of the same size. Its library needs no wait for a Work and no dispatcher: what those cost is
what the same call takes over a backend that moves nothing. A ratio shows what is left of farandole's time without it.
That ratio has the targets of 64 and 256 KiB, where what c10d takes before it asks any backend is up to all of Intel
MPI's time; from 1 MiB up they are for the whole time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from farandole.bench import _noop
from farandole.bench._mpi import HOW_TO_GET_IT, MpiPair
from farandole.bench._peers import measure_peers, on_ranks
from farandole.bench._ranks import Rank, RankPair
from farandole.bench._series import Report, Sample, Target, excess_ratio, ratio
from farandole.bench._settings import Settings
from farandole.bench._timing import time_each

OPERATIONS = ["all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"]
_SIZES = [2**10, 64 * 2**10, 256 * 2**10, 2**20, 16 * 2**20, 64 * 2**20]
_FIRST_WITH_TARGET = 64 * 2**10
_FIRST_AS_A_WHOLE = 2**20
_MPI = "Intel MPI"


def run_often(
    rank: Rank, operation: str, backend: str, size: int, warm_up: int, count: int, samples: int
) -> list[Sample]:
    """Runs on all ranks."""
    run = prepare(rank, operation, rank.groups[backend], size // 4)
    for _ in range(warm_up):
        run()
    return time_each(run, count, samples)


def prepare(rank: Rank, operation: str, group: dist.ProcessGroup, numel: int) -> Callable[[], None]:
    """A function that does the operation once; its result has been checked, where it moves something."""
    every = [float(one + 1) for one in range(rank.size)]
    shard = torch.full((numel // rank.size,), float(rank.rank + 1))
    whole = torch.full((numel,), float(rank.rank + 1))
    moves = group is not rank.groups.get(_noop.NOOP)
    check = _check if moves else lambda *result: None
    if operation == "all_reduce":
        dist.all_reduce(whole, group=group)
        check(operation, whole, [sum(every)])
        whole.zero_()  # stays what it is however often it is summed
        return lambda: dist.all_reduce(whole, group=group)
    if operation == "reduce_scatter_tensor":
        dist.reduce_scatter_tensor(shard, whole, group=group)
        check(operation, shard, [sum(every)])
        return lambda: dist.reduce_scatter_tensor(shard, whole, group=group)
    output = torch.zeros(numel)
    function, source = {
        "all_to_all_single": (dist.all_to_all_single, whole),
        "all_gather_into_tensor": (dist.all_gather_into_tensor, shard),
    }[operation]
    function(output, source, group=group)
    check(operation, output, every)
    return lambda: function(output, source, group=group)


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("collectives", "Collectives over 2 processes, float32, Python; bytes of the larger side")
    with contextlib.ExitStack() as stack:
        mpi = stack.enter_context(MpiPair(settings.mpi)) if settings.mpi is not None else None
        if mpi is None:
            report.notes.append(f"Without Intel MPI; to have it beside: {HOW_TO_GET_IT}")
        else:
            report.notes.append(f"Intel MPI is {mpi.library}")
        if _noop.is_built(settings.programs):
            pair.call(_noop.add_group, programs=settings.programs)
        else:
            report.notes.append(f"Without a backend that moves nothing: {_noop.HOW_TO_GET_IT}")
        for operation in OPERATIONS:
            _measure_one(report, settings, pair, mpi, operation)
    return report


def _measure_one(report: Report, settings: Settings, pair: RankPair, mpi: MpiPair | None, operation: str) -> None:
    peers = {
        backend: on_ranks(pair, run_often, operation=operation, backend=backend) for backend in ("farandole", "gloo")
    }
    if mpi is not None:
        peers[_MPI] = mpi.peer(operation)
    has_noop = _noop.is_built(settings.programs)
    if has_noop:
        peers[_noop.NOOP] = on_ranks(pair, run_often, operation=operation, backend=_noop.NOOP)
    all_sizes = measure_peers(report, settings, peers, _SIZES, case=f"{operation}, {{}}", count=_count)
    for size, series in all_sizes.items():
        report.ratios.append(ratio("gloo / farandole", series["gloo"], series["farandole"]))
        if mpi is not None:
            to_mpi = ratio("farandole / Intel MPI", series["farandole"], series[_MPI])
            report.ratios.append(to_mpi)
            judged = to_mpi if size >= _FIRST_AS_A_WHOLE else None
            if has_noop:
                without_c10d = excess_ratio(
                    "less no-op / Intel MPI", series["farandole"], series[_noop.NOOP], series[_MPI]
                )
                report.ratios.append(without_c10d)
                judged = judged or without_c10d
            if judged is not None and size >= _FIRST_WITH_TARGET:
                report.targets.append(Target(f"{judged.case}, {judged.name}", judged.median(), 1.0, at_most=True))


def _count(size: int) -> int:
    return max(4, min(400, 2**26 // size))


def _check(operation: str, tensor: torch.Tensor, values: list[float]) -> None:
    """The tensor has equal parts, one for each value. As the ranks of Intel MPI do it: what else is allocated here
    would take room in the caches that theirs have."""
    for part, value in zip(tensor.chunk(len(values)), values, strict=True):
        if not (part == value).all():
            raise RuntimeError(f"{operation}: got {part[:4].tolist()}..., expected {value} all over it")
