"""What the ranks are told when one of them dies, aborts or does not come, while CUDA tensors are under way."""

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from farandole.bench._gpus import Placement
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]
VICTIM = 1
BOUND = 20  # seconds, far less than the groups' timeout


def _backend():
    return dist.group.WORLD._get_backend(torch.device("cuda", torch.cuda.current_device()))


def _until_it_fails(operation):
    """Repeats the operation, and what a training loop does after it; when it failed, and with what."""
    deadline = time.monotonic() + 2 * BOUND
    while time.monotonic() < deadline:
        try:
            operation()
            torch.cuda.synchronize()
        except RuntimeError as error:
            return time.monotonic(), str(error)
    raise AssertionError(f"it still works after {2 * BOUND} s")


def _all_reduce(rank, world_size):
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)


def _exchange(rank, world_size):
    incoming = torch.empty(1000, device="cuda")
    ops = [
        dist.P2POp(dist.isend, torch.ones(1000, device="cuda"), (rank + 1) % world_size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


ACTIONS = {"all_reduce": _all_reduce, "batch": _exchange}


def _survive(rank, world_size, action):
    operation = ACTIONS[action]
    operation(rank, world_size)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == VICTIM:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    failed_at, message = _until_it_fails(lambda: operation(rank, world_size))
    with pytest.raises(RuntimeError):  # and from then on
        dist.all_reduce(torch.ones(4, device="cuda"))
        torch.cuda.synchronize()
    return failed_at - start, message


@pytest.mark.parametrize("action", ACTIONS)
def test_a_killed_rank_ends_the_operations_of_its_survivors_with_its_name(peers, action, record_property):
    outcomes = run_on_gpus(_survive, peers, may_die={VICTIM}, action=action)
    for rank, outcome in enumerate(outcomes):
        if rank != VICTIM:
            seconds, message = outcome
            print(f"rank {rank}: {message}")
            record_property(f"rank {rank} fails after, seconds", round(seconds, 3))
            assert seconds < BOUND
            assert f"rank {VICTIM} " in message, message


def _abort(rank, world_size):
    _all_reduce(rank, world_size)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == VICTIM:
        time.sleep(0.5)
        aborted_at = time.monotonic()
        _backend().abort()
        time.sleep(2)  # the others are told by the abort, not by its end
        return aborted_at, ""
    return _until_it_fails(lambda: _all_reduce(rank, world_size))


def test_an_abort_ends_the_operations_of_all_ranks(peers, record_property):
    outcomes = run_on_gpus(_abort, peers)
    aborted_at, _ = outcomes[VICTIM]
    for rank, (failed_at, message) in enumerate(outcomes):
        if rank != VICTIM:
            print(f"rank {rank}: {message}")
            record_property(f"rank {rank} fails after, seconds", round(failed_at - aborted_at, 3))
            assert failed_at - aborted_at < BOUND
            assert f"rank {VICTIM} " in message and "abort" in message, message


def _abort_alone(rank, world_size):
    _all_reduce(rank, world_size)
    torch.cuda.synchronize()
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(200_000_000)
    work = dist.all_reduce(x, async_op=True)
    _backend().abort()
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()  # the device itself goes on
    assert torch.ones(4, device="cuda").sum().item() == 4
    del work
    return str(error.value)


def test_after_an_abort_operations_are_refused_and_the_device_goes_on():
    (message,) = run_on_gpus(_abort_alone, Placement(1))
    assert "abort" in message


def _miss(rank, world_size):
    _all_reduce(rank, world_size)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == VICTIM:
        time.sleep(8)
        return 0.0, "late"
    _backend().set_timeout(datetime.timedelta(seconds=2))
    start = time.monotonic()
    failed_at, message = _until_it_fails(lambda: _all_reduce(rank, world_size))
    return failed_at - start, message


def test_a_collective_to_which_a_rank_does_not_come_times_out(peers):
    outcomes = run_on_gpus(_miss, peers)
    messages = [message for rank, (_, message) in enumerate(outcomes) if rank != VICTIM]
    for seconds, _ in (outcome for rank, outcome in enumerate(outcomes) if rank != VICTIM):
        assert 1.5 < seconds < BOUND
    print(messages)
    # One gives up first, and the others hear of it.
    assert any("not done after" in message or "time" in message for message in messages), messages


def _slow_kernel(rank, world_size):
    """A timeout is about the collective, not about the kernels that it is queued behind."""
    _all_reduce(rank, world_size)
    torch.cuda.synchronize()
    _backend().set_timeout(datetime.timedelta(seconds=20))
    x = torch.ones(8, device="cuda")
    for _ in range(3):
        torch.cuda._sleep(500_000_000)
        dist.all_reduce(x)
    torch.cuda.synchronize()
    return x[0].item()


def test_slow_kernels_before_a_collective_do_no_harm(world):
    assert run_on_gpus(_slow_kernel, world) == [float(world.size) ** 3] * world.size


def _leave(rank, world_size):
    _all_reduce(rank, world_size)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == world_size - 1:
        dist.destroy_process_group()
        time.sleep(1)
        return "left"
    return "stayed"


def test_a_rank_that_leaves_in_order_is_no_failure(peers):
    assert run_on_gpus(_leave, peers) == ["stayed"] * (peers.size - 1) + ["left"]
