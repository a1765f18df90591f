"""Resident memory stays flat over many operations."""

import os
import random

import pytest
import torch
import torch.distributed as dist

from support.processes import run_ranks
from support.sanitizers import SANITIZED

OPERATIONS = int(os.environ.get("FARANDOLE_MEMORY_OPERATIONS", "60000"))
SETTLED_AFTER = 20_000  # operations: allocators and rings have all they need by then
KIND_COUNT = 6


def _resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _run_many(rank, world_size, seed):
    choices = random.Random(seed)
    peer = 1 - rank
    small, large, out = torch.ones(4), torch.ones(3000), torch.zeros(2, 4)
    settled = 0
    for i in range(OPERATIONS):
        kind = choices.randrange(KIND_COUNT)
        if kind == 0:
            dist.all_reduce(small, op=dist.ReduceOp.MAX)
        elif kind == 1:
            dist.all_reduce(large, op=dist.ReduceOp.MAX, async_op=True).wait()
        elif kind == 2:
            dist.all_gather_into_tensor(out, small)
        elif kind == 3:
            (dist.send if rank == 0 else dist.recv)(small, peer)
        elif kind == 4:
            work = (dist.isend if rank == 1 else dist.irecv)(large, peer, tag=i % 7)
            work.wait()
        else:
            ops = [dist.P2POp(dist.isend, small, peer), dist.P2POp(dist.irecv, out[0], peer)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        if i == SETTLED_AFTER:
            settled = _resident_bytes()
    return settled, _resident_bytes()


@pytest.mark.skipif(SANITIZED, reason="the sanitizers keep what is freed")
def test_resident_memory_is_flat_over_many_operations(capsys):
    assert OPERATIONS > 2 * SETTLED_AFTER
    seed = random.randrange(1 << 30)
    for rank, (settled, end) in enumerate(
        run_ranks(_run_many, 2, "farandole", timeout=120 + OPERATIONS / 2000, seed=seed)
    ):
        with capsys.disabled():
            print(f"\nseed {seed}, rank {rank}: {settled >> 10} KiB -> {end >> 10} KiB", end="")
        assert end - settled < 8 * (OPERATIONS - SETTLED_AFTER)  # one pointer kept for each would show
