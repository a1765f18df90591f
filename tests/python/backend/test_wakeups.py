"""Who computes is woken up for what others depend on, and for what is asked for; for nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("for the loop, which only CPU tensors go by")

ROUNDS = 100


def loop_wakeups() -> int:
    """How often the thread that progresses what nobody waits for has slept."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "farandole":
            lines = (task / "status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    raise AssertionError(f"process {os.getpid()} has no loop")


def come_late(rank: int, world_size: int) -> None:
    data = torch.zeros(2)
    dist.all_reduce(data)
    before = loop_wakeups()
    for _ in range(ROUNDS):
        if rank == 1:
            time.sleep(0.01)  # until all others are asleep in their waits
        dist.all_reduce(data)
    if rank == 1:
        woken = loop_wakeups() - before
        assert woken < ROUNDS / 2, woken
    dist.barrier()


def test_who_has_not_called_a_collective_yet_is_not_woken_up_for_it():
    run_ranks(come_late, 2, "farandole")


def leave_pending(rank: int, world_size: int) -> None:
    data = torch.zeros(2)
    dist.all_reduce(data)
    woken = 0
    for _ in range(ROUNDS):
        if rank == 1:
            time.sleep(0.01)  # the other one has posted its own, and computes
        before = loop_wakeups()
        work = dist.all_reduce(data, async_op=True)
        time.sleep(0.02 if rank == 0 else 0.01)
        woken += loop_wakeups() - before
        work.wait()
    if rank == 0:
        assert woken < ROUNDS / 2, woken
    dist.barrier()


def test_nobody_is_woken_up_to_take_what_only_he_needs():
    run_ranks(leave_pending, 2, "farandole", timeout=60)


def ask(rank: int, world_size: int, how: str) -> None:
    data = torch.ones(2)
    for _ in range(20):
        dist.barrier()
        if rank == 1:
            time.sleep(0.01)
        work = dist.all_reduce(data, async_op=True)
        ended: list[float] = []
        if how == "future":
            work.get_future().then(lambda _, ended=ended: ended.append(time.monotonic()))
        until = time.monotonic() + 0.15  # less than the loop takes to look by itself
        while time.monotonic() < until and not (ended or (how == "poll" and work.is_completed())):
            time.sleep(0.001)
        assert time.monotonic() < until
        work.wait()
    assert data[0] == world_size**20


@pytest.mark.parametrize("how", ["future", "poll"])
def test_what_is_asked_for_ends_though_nobody_waits(how):
    run_ranks(ask, 2, "farandole", how=how)


def look(rank: int, world_size: int) -> None:
    for _ in range(3):
        dist.barrier()
        if rank == 1:
            time.sleep(0.05)
        data = torch.ones(2)
        work = dist.all_reduce(data, async_op=True)
        if rank == 0:
            until = time.monotonic() + 5
            while data[0] != world_size and time.monotonic() < until:
                time.sleep(0.01)
            assert data[0] == world_size
        work.wait()


def test_what_nobody_asks_for_ends_as_well():
    run_ranks(look, 2, "farandole")
