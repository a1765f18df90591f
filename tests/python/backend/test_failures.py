"""What the survivors are told when a rank dies, and how soon."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from support.processes import run_ranks

VICTIM = 1


def _survive(rank, world_size, action, delay):
    """Rank 1 is killed, at a random moment, while the others are in `action`."""
    dist.barrier()
    if rank == VICTIM:
        if action in ("send", "recv", "idle"):
            time.sleep(delay)  # it is waited for
        else:
            deadline = time.monotonic() + delay
            while time.monotonic() < deadline:
                _act(action, rank, world_size)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    messages = []
    for _ in range(3):  # the operation that was pending, and what comes later
        with pytest.raises(dist.DistBackendError) as error:
            while time.monotonic() < start + 20:
                _act(action, rank, world_size)
        messages.append(str(error.value))
    return time.monotonic() - start - delay, messages


def _act(action, rank, world_size):
    if action == "send":
        dist.send(torch.zeros(1 << 20), VICTIM)
    elif action == "recv":
        dist.recv(torch.zeros(8), VICTIM)
    elif action == "all_reduce":
        dist.all_reduce(torch.ones(10))
    elif action == "all_reduce_large":
        dist.all_reduce(torch.ones(3_000_000))
    elif action == "batch":
        peers = [peer for peer in range(world_size) if peer != rank]
        ops = [dist.P2POp(dist.isend, torch.ones(100), peer) for peer in peers]
        ops += [dist.P2POp(dist.irecv, torch.ones(100), peer) for peer in peers]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    elif action == "idle":  # nothing is pending when it happens
        time.sleep(1)
        dist.barrier()


@pytest.mark.parametrize("action", ["send", "recv", "all_reduce", "all_reduce_large", "batch", "idle"])
def test_a_killed_rank_is_named_by_its_survivors_within_seconds(action):
    outcomes = run_ranks(_survive, 3, "farandole", timeout=60, may_die={VICTIM}, action=action, delay=0.5)
    assert outcomes[VICTIM] is None
    for rank in (0, 2):
        seconds, messages = outcomes[rank]
        assert seconds < 20  # not the timeout of 60
        for message in messages:
            assert "rank 1 (host " in message and "its process died" in message, message
