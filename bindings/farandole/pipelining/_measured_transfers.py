"""How long messages between stages take: measured between the ranks, with messages of the stages' sizes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from farandole.pipelining._schedule import PipelineSchedule
from farandole.pipelining._stage_edges import edges_of
from farandole.pipelining._transfers import Transfers

_EXCHANGES = 7  # of each size, of which the median counts; one more comes before them
_TAG = 2**20

Job = tuple[int, int, tuple[int, ...]]  # two ranks of the group, bytes of each tensor


def measure_transfers(schedule: PipelineSchedule) -> Transfers:
    """How long the messages of the schedule's last step take while nothing else is done. All ranks of the pipeline's
    group call it.

    Messages of the sizes that the step has sent over each edge of the graph of stages go to and fro between the ranks at
    its two ends; a half of the median time of several counts. Where both ends are on one rank, the one after it takes
    part, for another plan may part them. One size after another is measured, 8 exchanges of each between each two ranks.
    Between GPUs it is the time that these take, by events on their streams. What a stage returns beside tensors is not
    measured.

        costs = profile_costs(gather_timeline(schedule), transfers=measure_transfers(schedule))
        made = auto_plan(num_stages, n_microbatches, costs)

    Raises:
        RuntimeError: a rank has not run a step yet, or the last one failed; on all ranks.
    """
    stage, run = schedule._stages[0], schedule._last_run
    group, size = stage.group, stage.group_size
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, None if run is None else run.executor.edge_sizes(), group=group)
    idle = [rank for rank, sizes in enumerate(everyone) if sizes is None]
    if idle:
        raise RuntimeError(f"measure_transfers() on ranks {idle} before their first step, expected it after one")
    if size == 1:
        return Transfers()
    plan = schedule.plan(forward_only=run is schedule._runs.get(False))
    owners = plan.rank_of_stage
    known = {(begin, end) for sizes in everyone for begin, end, _, _ in sizes}
    if known != set(edges_of(plan)):
        raise RuntimeError("measure_transfers() after a step that failed, expected it after one that did not")
    edges = sorted(tuple(edge) for sizes in everyone for edge in sizes)
    mine: dict[Job, float] = {}
    for job in sorted({job for edge in edges for job in _jobs(edge, owners, size)}):
        dist.barrier(group=group)  # one at a time
        if group.rank() in job[:2]:
            seconds = _exchange(job, group, stage.device)
            if group.rank() == job[0]:
                mine[job] = seconds
    dist.all_gather_object(everyone, mine, group=group)
    seconds_of: dict[Job, float] = {job: seconds for measured in everyone for job, seconds in measured.items()}
    by_edge = {}
    for edge in edges:
        there, back = (seconds_of.get(job, 0.0) for job in _jobs(edge, owners, size))
        by_edge[edge[0], edge[1]] = there, back
    every = [seconds for both in by_edge.values() for seconds in both]
    return Transfers(by_edge, statistics.median(every) if every else 0.0)


def _jobs(edge: Any, owners: list[int], size: int) -> Iterator[Job]:
    """What is measured for the messages with an output and those with its gradient."""
    begin, end, activation, gradient = edge
    there, back = owners[begin], owners[end]
    if there == back:
        back = (there + 1) % size
    for sizes in (activation, gradient):
        yield min(there, back), max(there, back), tuple(sizes)


def _exchange(job: Job, group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that messages of these sizes take in one direction."""
    first, second, sizes = job
    if not sizes:
        return 0.0
    begins = group.rank() == first
    peer = dist.get_global_rank(group, second if begins else first)
    sent, received = ([torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes] for _ in range(2))
    to_and_fro = _between_hosts if device.type == "cpu" else _between_devices
    return statistics.median(to_and_fro(begins, peer, group, sent, received)[1:]) / 2


def _between_hosts(
    begins: bool, peer: int, group: dist.ProcessGroup, sent: list[torch.Tensor], received: list[torch.Tensor]
) -> list[float]:
    """Seconds of each exchange."""
    times = []
    for _ in range(1 + _EXCHANGES):
        began = time.perf_counter()
        works = [dist.irecv(tensor, peer, group, _TAG + i) for i, tensor in enumerate(received)]
        if not begins:
            _wait(works)
            works = []
        works += [dist.isend(tensor, peer, group, _TAG + i) for i, tensor in enumerate(sent)]
        _wait(works)
        times.append(time.perf_counter() - began)
    return times


def _between_devices(
    begins: bool, peer: int, group: dist.ProcessGroup, sent: list[torch.Tensor], received: list[torch.Tensor]
) -> list[float]:
    """Seconds of each exchange. All are given to the device at once; what must not start early comes later, for a device
    may have one queue for all messages.
    """
    accelerator = torch.get_device_module(sent[0].device)
    marks = [accelerator.Event(enable_timing=True) for _ in range(2 + _EXCHANGES)]
    with accelerator.device(sent[0].device):
        marks[0].record()
        for mark in marks[1:]:
            for sends in (begins, not begins):
                post, tensors = (dist.isend, sent) if sends else (dist.irecv, received)
                _wait([post(tensor, peer, group, _TAG + i) for i, tensor in enumerate(tensors)])
            mark.record()
        marks[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
