"""What ranks do, again and again, until one of them is killed or aborts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

NAMED = ("send", "recv", "all_reduce", "batch", "idle")  # seen in every run
OTHERS = (
    "send_unreceived", "recv_unsent", "any_source", "all_reduce_small", "reduce_scatter", "broadcast", "all_to_all",
    "all_gather", "gather", "scatter", "batch_small",
)  # fmt: skip
ACTIONS = NAMED + OTHERS
LARGE = 3_000_000  # elements, 12 MB: many windows of a collective, and many single-copy reads of a message


def _messages(action: str, rank: int, world_size: int, victim: int) -> Callable[[], None]:
    others = [peer for peer in range(world_size) if peer != rank]
    if action.startswith("batch"):
        numel = 100 if action == "batch_small" else 400_000
        sent, into = torch.ones(world_size, 2, numel), torch.zeros(world_size, 2, numel)

        def exchange() -> None:
            ops = [dist.P2POp(dist.isend, sent[peer, i], peer, tag=i) for peer in others for i in range(2)]
            ops += [dist.P2POp(dist.irecv, into[peer, i], peer, tag=i) for peer in others for i in range(2)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return exchange
    if rank == victim and action in ("send_unreceived", "recv_unsent"):
        return lambda: time.sleep(0.001)
    data = torch.ones(LARGE if action != "any_source" else 100_000)
    if rank != victim:
        if action == "any_source":
            return lambda: dist.recv(data, None)
        return lambda: (dist.send if action.startswith("send") else dist.recv)(data, victim)

    def serve() -> None:
        for peer in others:
            (dist.recv if action == "send" else dist.send)(data, peer)

    return serve


def action_of(action: str, rank: int, world_size: int, victim: int) -> Callable[[], None]:
    """What ``rank`` does once in ``action``; its tensors are made now, so that most of its time is in the operation."""
    if action == "idle":  # nothing is pending when it happens
        if rank == victim:
            return lambda: time.sleep(0.001)

        asleep = threading.Event()

        def come_back() -> None:
            if not asleep.is_set():
                time.sleep(0.25)
            asleep.set()
            dist.barrier()

        return come_back
    if action.startswith(("send", "recv", "any", "batch")):
        return _messages(action, rank, world_size, victim)
    data, parts = torch.ones(LARGE), torch.zeros(world_size, LARGE // world_size)
    part = parts[rank].clone()
    if action == "all_reduce":
        return lambda: dist.all_reduce(data, dist.ReduceOp.MAX)
    if action == "all_reduce_small":
        return lambda: dist.all_reduce(data[:10], dist.ReduceOp.MAX)
    if action == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, data)
    if action == "broadcast":
        return lambda: dist.broadcast(data, victim)
    if action == "all_to_all":
        return lambda: dist.all_to_all_single(parts.view(-1), data)
    if action == "all_gather":
        return lambda: dist.all_gather_into_tensor(parts, part)
    target = (victim + 1) % world_size
    if action == "gather":  # to one that survives
        return lambda: dist.gather(part, list(parts) if rank == target else None, target)
    if action == "scatter":
        return lambda: dist.scatter(part, list(parts) if rank == victim else None, victim)
    raise ValueError(f"action is {action!r}; expected one of {ACTIONS}")
