"""What ranks do while another one is made to fail."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

ACTIONS = (
    "send", "recv", "all_reduce", "all_reduce_large", "all_to_all", "all_gather", "gather", "scatter", "batch", "idle"
)  # fmt: skip


def act(action: str, rank: int, world_size: int, victim: int) -> None:
    if action == "send":
        dist.send(torch.zeros(1 << 20), victim)
    elif action == "recv":
        dist.recv(torch.zeros(8), victim)
    elif action == "all_reduce":
        dist.all_reduce(torch.ones(10))
    elif action == "all_reduce_large":
        dist.all_reduce(torch.ones(3_000_000))
    elif action == "all_to_all":
        dist.all_to_all_single(torch.zeros(world_size << 17), torch.zeros(world_size << 17))
    elif action == "all_gather":
        dist.all_gather_into_tensor(torch.zeros(world_size << 20), torch.zeros(1 << 20))
    elif action == "gather":  # to one that survives
        outputs = list(torch.zeros(world_size, 1 << 17)) if rank == 0 else None
        dist.gather(torch.zeros(1 << 17), outputs, 0)
    elif action == "scatter":
        inputs = list(torch.zeros(world_size, 1 << 17)) if rank == victim else None
        dist.scatter(torch.zeros(1 << 17), inputs, victim)
    elif action == "batch":
        peers = [peer for peer in range(world_size) if peer != rank]
        ops = [dist.P2POp(dist.isend, torch.ones(100), peer) for peer in peers]
        ops += [dist.P2POp(dist.irecv, torch.ones(100), peer) for peer in peers]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    elif action == "idle":  # nothing is pending when it happens
        time.sleep(1)
        dist.barrier()
    else:
        raise ValueError(f"action is {action!r}; expected one of {ACTIONS}")


def act_until(deadline: float, action: str, rank: int, world_size: int, victim: int) -> None:
    """What a victim does before its end."""
    if action in ("send", "recv", "idle"):
        time.sleep(deadline - time.monotonic())  # it is waited for
    while time.monotonic() < deadline:
        act(action, rank, world_size, victim)


def survive(action: str, rank: int, world_size: int, victim: int, later: int = 2) -> tuple[float, list[str]]:
    """Acts until it fails, and then ``later`` times more; when the first failure came, and all errors."""
    failed_at = 0.0
    messages = []
    deadline = time.monotonic() + 20
    for _ in range(1 + later):
        with pytest.raises(dist.DistBackendError) as error:
            while time.monotonic() < deadline:
                act(action, rank, world_size, victim)
        failed_at = failed_at or time.monotonic()
        messages.append(str(error.value))
    return failed_at, messages
