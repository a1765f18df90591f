"""The one Work of a batch with several peers."""

import datetime
import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from support.devices import ON_CPU, only_on_cpu
from support.processes import await_all, run_ranks
from support.torch_features import HAS_GET_ERROR

LIMIT = datetime.timedelta(seconds=11 if ON_CPU else 61)  # GPUs are connected within it, too


def _receive_from_all(rank, world_size, into):
    return dist.batch_isend_irecv([dist.P2POp(dist.irecv, into[peer], peer) for peer in range(1, world_size)])


def _wait_in_vain(rank, world_size):
    if rank == 0:
        (work,) = _receive_from_all(rank, world_size, torch.zeros(world_size, 4))
        result = work.get_future_result()
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"recv from rank 1 .*not done after its timeout of \d+ ms"):
            work.wait(datetime.timedelta(seconds=1))
        seconds = time.monotonic() - start
        assert work.is_completed() and not work.is_success()
        assert result.wait() == 1  # TIMEOUT
        await_all(rank, world_size)
        return seconds
    await_all(rank, world_size)
    return 0


def _outlive(rank, world_size):
    group = dist.new_group(range(world_size))
    backend = group._get_backend(torch.device("cpu"))
    backend._start_coalescing()
    work = backend.send([torch.ones(1)], 1 - rank, 0)
    dist.destroy_process_group(group)
    del group, backend
    gc.collect()
    with pytest.raises(RuntimeError, match="waited for an operation of a batch before the batch was ended"):
        work.wait()
    return True


def _stale_member(rank, world_size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._start_coalescing()
    stale = backend.send([torch.ones(1)], 1 - rank, 0)
    backend._start_coalescing()
    received = torch.zeros(1)
    backend.send([torch.full((1,), float(rank))], 1 - rank, 0)
    backend.recv([received], 1 - rank, 0)
    with pytest.raises(RuntimeError, match="before the batch was ended"):
        stale.wait()
    backend._end_coalescing().wait()
    return received.item()


def test_waiting_in_vain_for_a_member_of_a_dropped_batch_leaves_the_next_one_open():
    assert run_ranks(_stale_member, 2, "farandole") == [1, 0]


def test_a_member_of_a_batch_that_was_never_ended_outlives_its_group():
    assert all(run_ranks(_outlive, 2, "farandole"))


@only_on_cpu("over NCCL no message is given up alone")
def test_a_time_limit_is_for_all_peers_of_a_batch_together():
    seconds = run_ranks(_wait_in_vain, 4, "farandole")[0]
    assert 1 <= seconds < 2.5, seconds  # one after the other: 3


def _facts(rank, world_size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.set_timeout(LIMIT)
    dist.group.WORLD._enable_collectives_timing()
    if rank == 0:
        into = torch.zeros(world_size, 4)
        works = [_receive_from_all(rank, world_size, into)[0] for _ in range(2)]
        for work in works:
            work.wait()
        assert [x[0].item() for x in into[1:]] == [1, 2]
        assert [x.tolist() for x in works[1].result()] == into[1:].tolist()
        if ON_CPU:  # NCCL's works have neither
            assert works[0].get_future_result().wait() == 0 and works[0]._get_duration() >= 0
        if hasattr(works[0], "timeout"):  # torch 2.11 does not show it
            assert works[0].timeout == LIMIT
    else:
        for _ in range(2):
            dist.send(torch.full((4,), float(rank)), 0)
    return True


def test_the_work_of_a_batch_tells_what_a_work_tells():
    assert all(run_ranks(_facts, 3, "farandole"))


def _kinds_of_ends(rank, world_size, end):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    ready = torch.ones(1)
    dist.all_reduce(ready)
    assert ready.item() == world_size and backend.get_error().name == "SUCCESS"
    dist.barrier()
    if end == "timeout" and rank == 1:
        return await_all(rank, world_size)
    if end == "death" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    backend.set_timeout(datetime.timedelta(milliseconds=300 if end == "timeout" else 20_000))
    with pytest.raises(dist.DistBackendError):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait() if ON_CPU else work.wait(datetime.timedelta(seconds=40))  # else the host does not wait
    if end == "timeout":
        await_all(rank, world_size)
    return backend.get_error().name


@pytest.mark.skipif(not HAS_GET_ERROR, reason=f"torch {torch.__version__} has no get_error")
@pytest.mark.parametrize(("end", "name"), [("timeout", "TIMEOUT"), ("death", "REMOTE_ERROR")])
def test_a_group_tells_why_it_is_over(end, name):
    outcomes = run_ranks(_kinds_of_ends, 2, "farandole", may_die={1} if end == "death" else (), end=end)
    assert outcomes[0] == name
