"""What a Work and its group tell: results, durations, barriers that name who is missing."""

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from support.devices import ON_CPU, only_on_cpu
from support.hosts import PretendHost
from support.processes import RankFailed, await_all, run_ranks


def _backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def _results(rank, world_size):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work.get_future_result().wait() == 0  # WorkResult.SUCCESS
    work.wait()
    if ON_CPU and rank == 0:
        work = dist.irecv(torch.zeros(1), 1, tag=3)
        result = work.get_future_result()
        with pytest.raises(RuntimeError, match="not done after its timeout of 30 ms"):
            work.wait(datetime.timedelta(milliseconds=30))
        assert result.wait() == 1  # TIMEOUT
        with pytest.raises(RuntimeError, match="RECV has no duration"):
            dist.irecv(torch.zeros(1), 1, tag=4)._get_duration()
    backend = _backend()
    has_error = hasattr(backend, "get_error")  # torch 2.11 has not
    assert not has_error or backend.get_error().name == "SUCCESS"
    await_all(rank, world_size)  # the first abort is every rank's error: also of a barrier under way
    if has_error:
        backend.abort()
        assert backend.get_error().name == "COMM_ERROR"
    return True


def test_results_are_told_apart_without_an_exception():
    assert all(run_ranks(_results, 2, "farandole"))


def _sparse_facts(rank, world_size):
    backend = _backend()
    backend.set_timeout(datetime.timedelta(seconds=11))
    dist.group.WORLD._enable_collectives_timing()
    start = time.monotonic()
    work = dist.all_reduce(torch.eye(3).to_sparse(), async_op=True)
    result = work.get_future_result()
    work.wait()
    assert result.wait() == 0 and work.get_future_result().wait() == 0  # WorkResult.SUCCESS
    dist.group.WORLD._wait_for_pending_works()
    assert 0 <= work._get_duration() <= 1000 * (time.monotonic() - start)
    if hasattr(work, "timeout"):  # torch 2.11 does not show it
        assert work.timeout == datetime.timedelta(seconds=11)
    # Another shape on each rank.
    wrong = dist.all_reduce(torch.eye(3 + rank).to_sparse(), async_op=True)
    with pytest.raises(ValueError, match=r"rank \d has a sparse tensor"):
        wrong.wait()
    assert wrong.get_future_result().wait() == 100  # UNKNOWN
    await_all(rank, world_size)
    if rank == 0:
        backend.set_timeout(datetime.timedelta(milliseconds=30))
        late = dist.all_reduce(torch.eye(3).to_sparse(), async_op=True)
        with pytest.raises(RuntimeError, match="not done after its timeout of 30 ms"):
            late.wait()
        assert late.get_future_result().wait() == 1  # TIMEOUT
    await_all(rank, world_size, "behind the timeout")
    return True


@only_on_cpu("NCCL's works have no durations")
def test_the_work_of_a_sparse_sum_tells_what_a_work_tells():
    assert all(run_ranks(_sparse_facts, 2, "farandole"))


def _threads_wait(rank, world_size):
    peer = 1 - rank
    assert torch.all(torch.full((1000,), 1.0) == 1)  # a GPU would load these kernels when all receives have ended
    into = [torch.zeros(1000) for _ in range(32)]
    works = [dist.irecv(x, peer, tag=i) for i, x in enumerate(into)]
    failures = []

    def wait(index):
        try:
            works[index].wait()
            assert torch.all(into[index] == index)
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=wait, args=(i,)) for i in reversed(range(32))]
    for thread in threads:
        thread.start()
    for i in range(32):
        dist.send(torch.full((1000,), float(i)), peer, tag=i)
    for thread in threads:
        thread.join()
    again = threading.Thread(target=works[0].wait)  # once more, by somebody else
    again.start()
    again.join()
    return failures


def test_a_work_is_waited_for_by_any_thread():
    assert run_ranks(_threads_wait, 2, "farandole") == [[], []]


def _monitored_barrier(seconds=30, wait_all_ranks=False):
    # dist.monitored_barrier of torch 2.11 is for a group whose backend is named gloo.
    dist.group.WORLD.monitored_barrier(datetime.timedelta(seconds=seconds), wait_all_ranks)


def _barrier_with_missing(rank, world_size, missing, wait_all):
    _monitored_barrier()
    if rank in missing:
        time.sleep(2.5)
    start = time.monotonic()
    try:
        _monitored_barrier(1, wait_all)
        return None
    except RuntimeError as error:
        assert time.monotonic() - start < 5
        after = torch.ones(1)
        dist.all_reduce(after)  # the group is usable
        assert after.item() == world_size
        return str(error)


@only_on_cpu("a monitored barrier is the CPU's")
@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("wait_all", [False, True])
def test_a_monitored_barrier_names_who_is_missing_on_every_rank(wait_all, hosts):
    options = {"missing": [1, 3], "wait_all": wait_all}
    errors = run_ranks(_barrier_with_missing, 4, "farandole", enter=PretendHost(hosts), **options)
    if wait_all:
        assert "Ranks 1, 3 failed to pass monitoredBarrier in 1000 ms" in errors[0]
    else:
        assert "Rank 1 failed to pass monitoredBarrier in 1000 ms" in errors[0] and "3 failed" not in errors[0]
    for rank in (1, 2, 3):  # also those that came late
        assert "Rank 1 failed to pass monitoredBarrier in 1000 ms, says rank 0" in errors[rank]


def _barrier_with_dead(rank, world_size):
    _monitored_barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"rank 2 \(host .*its process died"):
        _monitored_barrier(3, wait_all_ranks=True)


@only_on_cpu("a monitored barrier is the CPU's")
def test_a_monitored_barrier_names_a_dead_rank():
    with pytest.raises(RankFailed) as failure:
        run_ranks(_barrier_with_dead, 3, "farandole", timeout=30)
    assert "[rank 2] process ended" in str(failure.value)
    assert "[rank 0]" not in str(failure.value) and "[rank 1]" not in str(failure.value)
