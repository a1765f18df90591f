"""Ranks that call different collectives are all told so, by that call or, where nobody waited in it, by a later one."""

import datetime
import os
import random

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.hosts import PretendHost
from support.processes import run_ranks

pytestmark = only_on_cpu("NCCL does not compare calls")

WAYS = {
    "one host": ({}, None),
    "ucx": ({"FARANDOLE_TRANSPORT": "ucx"}, None),
    "hosts of one rank": ({}, (0, 1, 2)),
    "two hosts": ({}, (0, 1, 1)),
}
CALLS = {
    "broadcast": lambda root, x: dist.broadcast(x, root),
    "reduce": lambda root, x: dist.reduce(x, root),
    "all_reduce": lambda root, x: dist.all_reduce(x),
    "minimum": lambda root, x: dist.all_reduce(x, dist.ReduceOp.MIN),
    "halves": lambda root, x: dist.all_reduce(x.half()),
    "gather": lambda root, x: dist.gather(x, _list(x) if dist.get_rank() == root else None, root),
    "scatter": lambda root, x: dist.scatter(x, _list(x) if dist.get_rank() == root else None, root),
    "all_gather": lambda root, x: dist.all_gather(_list(x), x),
    "barrier": lambda root, x: dist.barrier(),
}


# Calls in which ranks give and get different sizes, in parts, of their own or none.
UNEVEN = {
    "all_to_all": lambda root, x: dist.all_to_all(_parts(_column, x), _parts(_row, x)),
    "all_to_all_single": lambda root, x: dist.all_to_all_single(
        torch.zeros(sum(_column(x))), torch.ones(sum(_row(x))), _column(x), _row(x)
    ),
    "all_gather": lambda root, x: dist.all_gather(_parts(_row_of_all, x), torch.ones(_row_of_all(x)[dist.get_rank()])),
    "reduce_scatter": lambda root, x: dist.reduce_scatter(
        torch.zeros(_row_of_all(x)[dist.get_rank()]), _parts(_row_of_all, x)
    ),
    "reduce_scatter_tensor": lambda root, x: dist.reduce_scatter_tensor(x, torch.cat(_list(x))),
    "all_gather_into_tensor": lambda root, x: dist.all_gather_into_tensor(torch.cat(_list(x)), x),
    "coalesced": lambda root, x: dist.all_reduce_coalesced([x, x[:0], x.clone()]),
    "nothing": lambda root, x: dist.broadcast(x[:0], root),
    "some": lambda root, x: dist.all_reduce(x, group=_some()) if dist.get_rank() < 2 else _some(),
    "objects": lambda root, x: dist.all_gather_object([None] * dist.get_world_size(), "a" * dist.get_rank()),
}


def _some():
    return dist.new_group([0, 1])


def _row(x):
    return [(dist.get_rank() + 2 * other) % 3 * len(x) for other in range(dist.get_world_size())]


def _column(x):
    return [(other + 2 * dist.get_rank()) % 3 * len(x) for other in range(dist.get_world_size())]


def _row_of_all(x):
    return [other % 3 * len(x) for other in range(dist.get_world_size())]


def _parts(sizes, x):
    return [torch.ones(size) for size in sizes(x)]


def _list(x):
    return [torch.zeros_like(x) for _ in range(dist.get_world_size())]


def _draw(rng, world_size):
    return rng.choice(list(CALLS)), rng.randrange(world_size), rng.choice([1, 7, 20_000])


def _differ(rank, world_size, seed):
    """Some calls alike, one that is another on one rank, and then more that are alike."""
    rng = random.Random(seed)
    calls = [_draw(rng, world_size) for _ in range(rng.randrange(3))]
    mine = theirs = _draw(rng, world_size)
    while theirs == mine or {mine[0], theirs[0]} <= {"barrier"} or _alike(mine, theirs):
        theirs = _draw(rng, world_size)
    odd = rng.randrange(world_size)
    calls.append(theirs if rank == odd else mine)
    calls += [("all_reduce", 0, 5)] * 12
    # Where all wait for somebody else, as for the roots of two broadcasts, there is no message to tell it by.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=4))
    for name, root, numel in calls:
        try:
            CALLS[name](root, torch.ones(numel))
        except (ValueError, RuntimeError) as error:
            return str(error)
    return f"nothing was told: {mine} on most ranks, {theirs} on rank {odd}"


def _alike(one, other):
    """What has no root is the same call with any."""
    rootless = {"all_reduce", "minimum", "halves", "all_gather", "barrier"}
    return one[0] == other[0] and one[0] in rootless and (one[2] == other[2] or one[0] == "barrier")


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_differs_on_one_rank_is_told_to_all(way):
    env, hosts = WAYS[way]
    first = int(os.environ.get("FARANDOLE_CALLS_SEED", random.SystemRandom().randrange(10**6)))
    for seed in range(first, first + 8):
        enter = PretendHost(hosts) if hosts else None
        texts = run_ranks(_differ, 3, "farandole", env=env, enter=enter, seed=seed)
        for rank, text in enumerate(texts):
            assert "nothing was told" not in text, f"FARANDOLE_CALLS_SEED={seed}, rank {rank}: {text}"
        told = [text for text in texts if "expected the same on all ranks" in text or " bytes" in text]
        all_wait = way != "one host" and all("its timeout" in text for text in texts)
        assert told or all_wait, f"FARANDOLE_CALLS_SEED={seed}: {texts}"


def _broadcast_from_each(rank, world_size):
    try:
        dist.broadcast(torch.full((3,), float(rank)), rank)
        for _ in range(8):  # one in 64 differences goes by a message
            dist.all_reduce(torch.ones(2))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was told"


@pytest.mark.parametrize("way", ["ucx", "hosts of one rank"])
def test_roots_that_differ_are_told_with_the_last_calls(way):
    env, hosts = WAYS[way]
    texts = run_ranks(_broadcast_from_each, 3, "farandole", env=env, enter=PretendHost(hosts) if hosts else None)
    for text in texts:
        assert "has called other collectives than rank" in text, texts
        assert "broadcast of 12 bytes with root" in text and "all_reduce of 8 bytes (SUM of Float)" in text, texts


def _same_calls(rank, world_size, seed, asynchronous):
    rng = random.Random(seed)
    pending = []
    for _ in range(60):
        name, root, numel = _draw(rng, world_size)
        if asynchronous and name == "all_reduce":
            pending.append(dist.all_reduce(torch.ones(numel), async_op=True))
            continue
        if rng.random() < 0.1:
            dist.all_reduce(torch.eye(4).to_sparse())
        uneven = rng.choice(list(UNEVEN))
        UNEVEN[uneven](root, torch.ones(numel))
        CALLS[name](root, torch.ones(numel))
        if rng.random() < 0.1 and torch.__version__ >= "2.15":  # before, torch refuses it
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
    for work in pending:
        work.wait()
    return True


@pytest.mark.parametrize("way", WAYS)
def test_calls_that_are_the_same_are_taken_for_the_same(way):
    env, hosts = WAYS[way]
    seed = random.SystemRandom().randrange(10**6)
    for asynchronous in (False, True):
        enter = PretendHost(hosts) if hosts else None
        outcome = run_ranks(_same_calls, 3, "farandole", env=env, enter=enter, seed=seed, asynchronous=asynchronous)
        assert outcome == [True] * 3, seed
