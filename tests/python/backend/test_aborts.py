"""An abort from another thread, at a random moment, while the ranks are in an operation."""

import datetime
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from backend.actions import action_of
from support.devices import only_on_cpu
from support.hosts import Hosts
from support.processes import await_all, run_ranks

pytestmark = only_on_cpu("tests/python/gpu/test_failures has it on GPUs")

ABORTER, ABSENT = 1, 2
HOST_OF_RANK = (0, 0, 1)
# Until the abort the ranks do these one after the other.
RUNNING = ("all_reduce", "all_reduce_small", "batch", "batch_small", "reduce_scatter", "all_to_all", "broadcast")
# These wait for a rank that does not come.
WAITING = ("all_reduce", "large all_reduce", "batch", "monitored barrier", "recv from any", "recv", "large send")


def _backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def _wait_in(action, rank):
    if action == "all_reduce":
        dist.all_reduce(torch.ones(4))
    elif action == "large all_reduce":
        dist.all_reduce(torch.ones(3_000_000), async_op=True).wait()
    elif action == "batch":
        ops = [dist.P2POp(dist.isend, torch.ones(400_000), ABSENT), dist.P2POp(dist.irecv, torch.ones(9), ABSENT)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    elif action == "monitored barrier":
        dist.group.WORLD.monitored_barrier(datetime.timedelta(seconds=40))
    elif action == "recv from any":
        dist.recv(torch.ones(9), None)
    elif action == "recv":
        dist.recv(torch.ones(9), ABSENT)
    elif action == "large send":
        dist.send(torch.ones(3_000_000), ABSENT)
    else:
        raise ValueError(f"action is {action!r}; expected one of {WAITING}")


def _abort(rank, world_size, action, delay, runs):
    act = action_of(action, rank, world_size, victim=0) if runs else lambda: _wait_in(action, rank)
    aborted_at = []

    def abort():
        time.sleep(delay)
        aborted_at.append(time.monotonic())
        _backend().abort()

    await_all(rank, world_size, "to the abort")
    aborter = threading.Thread(target=abort)
    if rank == ABORTER:
        aborter.start()
    result = None
    if runs or rank != ABSENT:
        with pytest.raises(RuntimeError) as error:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                act()
        result = time.monotonic(), str(error.value)
    if rank == ABORTER:
        aborter.join()
    await_all(rank, world_size)
    with pytest.raises(dist.DistBackendError) as later:
        for _ in range(3 if rank == ABSENT else 1):  # it may find what others had sent before they were told
            dist.all_reduce(torch.ones(4))
    return result, str(later.value), aborted_at


def _check(action, where, runs):
    delay = 10 ** random.uniform(-3, -0.7)
    print(f"aborted after {1e3 * delay:.1f} ms")
    options = {"action": action, "delay": delay, "runs": runs}
    if where == "two hosts":
        with Hosts(2) as hosts:
            outcomes = run_ranks(_abort, 3, "farandole", enter=hosts.enter(HOST_OF_RANK), **options)
    else:
        outcomes = run_ranks(_abort, 3, "farandole", env={"FARANDOLE_TRANSPORT": where}, **options)
    (aborted_at,) = outcomes[ABORTER][2]
    for rank, (result, later, _) in enumerate(outcomes):
        for message in [later] if result is None else [result[1], later]:
            if rank == ABORTER:
                assert "abort" in message, message
            else:
                assert "rank 1 (host " in message and "aborted the group" in message, (rank, message)
        if result is not None:
            assert -0.01 < result[0] - aborted_at < 1, (rank, result)


@pytest.mark.sample(5)
@pytest.mark.parametrize("action", RUNNING)
@pytest.mark.parametrize("where", ["shm", "ucx", "two hosts"])
def test_an_abort_in_the_middle_of_operations_ends_them_for_all(action, where):
    _check(action, where, runs=True)


@pytest.mark.sample(8)
@pytest.mark.parametrize("action", WAITING)
@pytest.mark.parametrize("where", ["shm", "ucx", "two hosts"])
def test_an_abort_ends_what_waits(action, where):
    _check(action, where, runs=False)
