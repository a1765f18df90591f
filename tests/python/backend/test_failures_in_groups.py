"""What a death is for several works at once, for the groups that have no part in it, and for one that is being made."""

import datetime
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from backend.failing import BOUND, Killer, Progress, first_seed, random_delay
from support.hosts import PretendHost
from support.processes import await_all, run_ranks

VICTIM = 1
TRANSPORTS = {"shm": {}, "ucx": {"FARANDOLE_TRANSPORT": "ucx"}}


def _killed(fn, world_size, folder, **options):
    """Runs it while the victim is killed; when that was, and what the ranks return."""
    seed = first_seed()
    delay = random_delay(seed)
    print(f"FARANDOLE_FAILURE_SEED={seed}: killed after {1e3 * delay:.1f} ms")
    path = folder / "progress"
    with Killer(path, delay) as killer:
        outcomes = run_ranks(fn, world_size, "farandole", may_die={VICTIM}, path=path, **options)
    assert outcomes[VICTIM] is None
    return killer.killed_at, outcomes


def _pending(rank, world_size, path):
    """Works of many kinds, which all wait for the victim in some way."""
    large, small = torch.ones(3_000_000), torch.ones(10)
    parts = torch.zeros(world_size, 10)
    other = 2 - rank
    await_all(rank, world_size, "to the death")
    if rank == VICTIM:
        Progress(path).set(1, 0)
        time.sleep(20)
    works = {
        "recv": dist.irecv(torch.zeros(8), VICTIM, tag=1),
        "recv from any": dist.irecv(torch.zeros(8), None, tag=2),
        "recv of a survivor": dist.irecv(torch.zeros(8), other, tag=3),
        "large send": dist.isend(large, VICTIM, tag=4),
        "large all_reduce": dist.all_reduce(large.clone(), async_op=True),
        "all_reduce": dist.all_reduce(small, async_op=True),
        "broadcast": dist.broadcast(small.clone(), VICTIM, async_op=True),
        "all_gather": dist.all_gather_into_tensor(parts, small.clone(), async_op=True),
        "all_to_all": dist.all_to_all_single(parts[:, :3].contiguous(), parts[:, 3:6].contiguous(), async_op=True),
        "barrier": dist.barrier(async_op=True),
    }
    batch = [dist.P2POp(dist.irecv, torch.zeros(8), peer, tag=5) for peer in (VICTIM, other)]
    works |= {f"batch {i}": work for i, work in enumerate(dist.batch_isend_irecv(batch))}
    future = works["all_reduce"].get_future()
    errors = {}

    def wait(name):
        try:
            works[name].wait()
            errors[name] = "no error"
        except dist.DistBackendError as error:
            errors[name] = str(error)

    threads = [threading.Thread(target=wait, args=(name,)) for name in list(works)[::3]]  # others are waited for here
    for thread in threads:
        thread.start()
    for name in works:
        wait(name)
    for thread in threads:
        thread.join()
    with pytest.raises(RuntimeError) as error:
        future.wait()
    return time.monotonic(), errors | {"future": str(error.value)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_works_that_are_pending_end_and_name_the_dead(transport, tmp_path):
    killed_at, outcomes = _killed(_pending, 3, tmp_path, env=TRANSPORTS[transport])
    for rank in (0, 2):
        ended_at, errors = outcomes[rank]
        assert ended_at - killed_at < BOUND
        assert len(errors) >= 12
        for name, text in errors.items():
            assert "rank 1 (host " in text and "its process died" in text, (rank, name, text)


def _groups(rank, world_size, path):
    without = dist.new_group([0, 2, 3])
    with_it = {"two": dist.new_group([0, 1]), "three": dist.new_group([1, 2, 3]), "world": dist.group.WORLD}
    mine = {name: group for name, group in with_it.items() if rank in dist.get_process_group_ranks(group)}
    tensors = {name: torch.ones(400_000) for name in mine}
    await_all(rank, world_size, "to the death")
    if rank == VICTIM:
        Progress(path).set(1, 0)
        time.sleep(20)
    pending = {
        name: dist.all_reduce(tensors[name], group=group, async_op=True)
        for name, group in sorted(mine.items(), key=lambda item: item[0])
    }
    errors = {}
    failed_at = 0.0
    stop = torch.zeros(1)
    sums = 0
    deadline = time.monotonic() + 20
    while not stop.item():  # of the others too: each does as many
        for size in (10, 400_000):
            x = torch.full((size,), float(rank))
            dist.all_reduce(x, group=without)
            assert x.min() == x.max() == 0 + 2 + 3
            sums += 1
        for name, work in list(pending.items()):
            if work.is_completed():
                with pytest.raises(dist.DistBackendError) as error:
                    work.wait()
                with pytest.raises(dist.DistBackendError) as later:
                    dist.all_reduce(torch.ones(1), group=mine[name])
                errors[name] = [str(error.value), str(later.value)]
                del pending[name]
                failed_at = failed_at or time.monotonic()
        stop[0] = not pending or time.monotonic() > deadline
        dist.all_reduce(stop, dist.ReduceOp.MIN, group=without)
    assert not pending
    for _ in range(20):  # with the others gone for good
        dist.all_reduce(torch.ones(1000), group=without)
    return failed_at, errors, sums


@pytest.mark.parametrize("transport", [*TRANSPORTS, "two hosts"])
def test_a_group_without_the_dead_goes_on_and_those_with_it_name_it(transport, tmp_path):
    options = {"enter": PretendHost((0, 1, 1, 0))} if transport == "two hosts" else {"env": TRANSPORTS[transport]}
    killed_at, outcomes = _killed(_groups, 4, tmp_path, **options)
    rank_in = {"two": 1, "three": 0, "world": 1}  # a group's errors count in the group
    pids = set()
    for rank in (0, 2, 3):
        failed_at, errors, sums = outcomes[rank]
        assert set(errors) == {"world", "two" if rank == 0 else "three"}
        assert 0 < failed_at - killed_at < BOUND and sums > 0
        for name, messages in errors.items():
            for message in messages:
                told = re.search(
                    rf"rank {rank_in[name]} \(host [^,]*, pid (\d+)\) (failed|is gone): its process ", message
                )
                assert told, (rank, name, message)
                pids.add(told[1])
    assert len(pids) == 1


def _make_group(rank, world_size, stays):
    dist.barrier()
    if rank == VICTIM:
        if stays:  # it has said that it is there
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises((dist.DistBackendError, dist.DistStoreError)) as error:
        group = dist.new_group(timeout=datetime.timedelta(seconds=2))
        while True:
            dist.all_reduce(torch.ones(10), group=group)
    seconds = time.monotonic() - start
    with pytest.raises(dist.DistBackendError) as world:
        dist.all_reduce(torch.ones(1))
    return seconds, str(error.value), str(world.value)


@pytest.mark.parametrize("stays", [False, True])
def test_a_group_whose_member_dies_while_it_is_made_is_an_error_in_time(stays):
    outcomes = run_ranks(_make_group, 3, "farandole", may_die={VICTIM}, stays=stays)
    for rank in (0, 2):
        seconds, error, world = outcomes[rank]
        assert seconds < 2 + BOUND
        assert "rank 1 " in error and "rank 1 (host " in world, (error, world)
