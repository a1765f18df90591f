"""Resident memory stays flat over many operations of all kinds.

FARANDOLE_MEMORY_OPERATIONS sets how many there are (default 60000; a quarter of them over UCX).
"""

import datetime
import itertools
import os
import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.processes import run_ranks
from support.resources import resident_bytes
from support.sanitizers import SANITIZED

pytestmark = only_on_cpu("it is about the host's memory")

OPERATIONS = int(os.environ.get("FARANDOLE_MEMORY_OPERATIONS", "60000"))
# Tags of receives that nobody sends for, and of what any rank sends.
NOBODYS_TAG, ANYBODYS_TAG = 1001, 1002


class Kinds:
    """What the two ranks do, each kind a method; both draw alike."""

    # Those that take milliseconds, or are errors, come up once in 50.
    RARE = ("objects", "timeout", "monitored_barrier", "sparse")

    def __init__(self, rank):
        self.rank, self.peer = rank, 1 - rank
        self.small, self.large, self.huge = torch.ones(4), torch.ones(3000), torch.ones(40_000)
        self.out, self.large_out, self.huge_out = torch.zeros(2, 4), torch.zeros(2, 3000), torch.zeros(40_000)
        self.large_in, self.halves = torch.ones(2, 3000), self.small.half()
        self.backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    @classmethod
    def names(cls):
        """With those that are not rare as often as they are drawn."""
        names = [name for name in vars(cls) if not name.startswith("_") and name not in ("RARE", "names")]
        return [name for name in names if name in cls.RARE] + [n for n in names if n not in cls.RARE for _ in range(10)]

    def all_reduce(self):
        dist.all_reduce(self.small, op=dist.ReduceOp.MAX)

    def all_reduce_async(self):
        dist.all_reduce(self.large, op=dist.ReduceOp.MAX, async_op=True).wait()

    def all_reduce_huge(self):
        dist.all_reduce(self.huge, op=dist.ReduceOp.MAX)

    def all_reduce_average_of_halves(self):
        dist.all_reduce(self.halves, op=dist.ReduceOp.AVG)

    def reduce(self):
        dist.reduce(self.large, 1, op=dist.ReduceOp.MAX)

    def broadcast(self):
        dist.broadcast(self.large, 0)

    def all_gather(self):
        dist.all_gather_into_tensor(self.out, self.small)

    def all_gather_list(self):
        dist.all_gather(list(self.large_out), self.large)

    def gather(self):
        dist.gather(self.large, list(self.large_out) if self.rank == 0 else None, 0)

    def scatter(self):
        dist.scatter(self.large, list(self.large_out) if self.rank == 1 else None, 1)

    def reduce_scatter(self):
        dist.reduce_scatter_tensor(self.small, self.out, op=dist.ReduceOp.MAX)

    def reduce_scatter_list(self):
        dist.reduce_scatter(self.large, list(self.large_out), op=dist.ReduceOp.MAX)

    def all_to_all(self):
        dist.all_to_all_single(self.large_out, self.large_in)

    def all_to_all_uneven(self):
        mine = 1 + self.rank  # to rank 0 one, to rank 1 two
        dist.all_to_all_single(self.large_out[0, : 2 * mine], self.large[:3], [mine, mine], [1, 2])

    def all_to_all_list(self):
        dist.all_to_all(list(self.large_out), [self.large, self.large])

    def coalesced(self):
        with dist._coalescing_manager():
            dist.all_reduce(self.small, op=dist.ReduceOp.MAX)
            dist.all_reduce(self.large, op=dist.ReduceOp.MAX)

    def barrier(self):
        dist.barrier()

    def message(self):
        (dist.send if self.rank == 0 else dist.recv)(self.small, self.peer)

    def message_async(self):
        (dist.isend if self.rank == 1 else dist.irecv)(self.large, self.peer, tag=3).wait()

    def message_that_is_read(self):
        (dist.isend if self.rank == 1 else dist.irecv)(self.huge, self.peer, tag=4).wait()

    def message_from_anybody(self):
        if self.rank == 0:
            dist.send(self.large, 1, tag=ANYBODYS_TAG)
        else:
            dist.recv(self.large, None, tag=ANYBODYS_TAG)

    def message_that_comes_before_its_receive(self):
        work = dist.isend(self.small, self.peer, tag=5)
        dist.recv(self.out[0], self.peer, tag=5)
        work.wait()

    def batch(self):
        ops = [dist.P2POp(dist.isend, self.small, self.peer), dist.P2POp(dist.irecv, self.out[0], self.peer)]
        ops += [dist.P2POp(dist.isend, self.huge, self.peer), dist.P2POp(dist.irecv, self.huge_out, self.peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def future(self):
        work = dist.all_reduce(self.small, op=dist.ReduceOp.MAX, async_op=True)
        called = work.get_future().then(lambda future: len(future.value()))
        work.wait()
        assert called.wait() == 1

    def freed_early(self):
        works = [dist.isend(torch.ones(3000), self.peer, tag=6), dist.irecv(torch.ones(3000), self.peer, tag=6)]
        for work in works:
            work.wait()

    def objects(self):
        everybodys = [None, None]
        dist.all_gather_object(everybodys, {"rank": self.rank})

    def timeout(self):
        with pytest.raises(RuntimeError, match="not done after its timeout of 1 ms"):
            dist.irecv(self.out[0], self.peer, tag=NOBODYS_TAG).wait(datetime.timedelta(milliseconds=1))

    def monitored_barrier(self):
        dist.group.WORLD.monitored_barrier(datetime.timedelta(seconds=30), True)

    def sparse(self):
        dist.all_reduce(torch.eye(8).to_sparse())


def _run_many(rank, world_size, seed, operations):
    """What is resident after each quarter: by the first, allocators and rings have nearly all they need."""
    choices = random.Random(seed)
    kinds, names, seen, resident = Kinds(rank), Kinds.names(), Counter(), []
    for i in range(1, operations + 1):
        name = choices.choice(names)
        getattr(kinds, name)()
        seen[name] += 1
        if i % (operations // 4) == 0:
            resident.append(resident_bytes())
    dist.barrier()  # who leaves is missed by an operation that times out
    return resident, seen


@pytest.mark.skipif(SANITIZED, reason="the sanitizers keep what is freed")
@pytest.mark.timeout(300 + OPERATIONS / 200)
@pytest.mark.parametrize(("transport", "share", "pools"), [("shm", 1, 0), ("ucx", 4, 1 << 18)])
def test_resident_memory_is_flat_over_many_operations(transport, share, pools, capsys):
    """``pools``: bytes by which UCX's memory pools may still grow in each quarter."""
    operations = OPERATIONS // share
    seed = random.randrange(1 << 30)
    options = {"timeout": 240 + operations / 200, "env": {"FARANDOLE_TRANSPORT": transport}}
    outcomes = run_ranks(_run_many, 2, "farandole", **options, seed=seed, operations=operations)
    for rank, (resident, seen) in enumerate(outcomes):
        with capsys.disabled():
            sizes = " -> ".join(f"{size >> 10} KiB" for size in resident)
            print(f"\nseed {seed}, {operations} operations, {transport}, rank {rank}: {sizes}", end="")
        assert set(seen) == set(Kinds.names())
        # What is kept of each operation shows in every quarter, also where it is a pointer; what an allocator takes
        # once, in one of them.
        growth = [after - before for before, after in itertools.pairwise(resident)]
        assert min(growth) < 8 * (operations // 4) + pools
