"""The clocks of a group's ranks on one scale."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PINGS = 16


def clock_offset(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds by which ``time.monotonic()`` is ahead of that of the group's rank 0. All ranks of the group call it.

    Processes of one host share the clock. Others ask rank 0 what time it is, and take the answer that was there
    fastest: the error is at most half of that round trip.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    clocks: list[Any] = [None] * size
    dist.all_gather_object(clocks, _clock_identity(), group=group)
    if rank == 0:
        for peer in range(1, size):
            if clocks[peer] != clocks[0]:
                _answer(group, peer, device)
        return 0.0
    return 0.0 if clocks[rank] == clocks[0] else _ask(group, device)


def _answer(group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_PINGS):
        dist.recv(message, group=group, group_src=peer)
        message.item()  # it has come, also on a device
        message.fill_(time.monotonic())
        dist.send(message, group=group, group_dst=peer)


def _ask(group: dist.ProcessGroup, device: torch.device) -> float:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    answers = []
    for _ in range(_PINGS):
        before = time.monotonic()
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        theirs = message.item()
        after = time.monotonic()
        answers.append((after - before, (before + after) / 2 - theirs))
    return min(answers)[1]


def _clock_identity() -> str:
    """Equal where ``time.monotonic()`` is the same clock: one boot of one kernel, one namespace of time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
