"""Waits for gloo's collectives in code that is not ours: gloo has no abort, which would end them."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from farandole import _C

_LOOK = datetime.timedelta(milliseconds=200)

_lock = threading.Lock()
_groups: dict[int, Sequence[dist.ProcessGroup]] = {}  # by thread that is inside
_torchs_wait: Any = None  # while a thread is


@contextlib.contextmanager
def looking_after(groups: Sequence[dist.ProcessGroup], device: torch.device) -> Iterator[None]:
    """Inside, this thread's waits end soon after another rank has given up one of these groups, where all are gloo's for
    tensors on the device: other works may not outlive a wait that has run out of time, NCCL's end their group then. Not
    to be nested.

    Raises:
        RuntimeError: from such a wait.
    """
    if not groups or not all(_is_gloo(group, device) for group in groups):
        yield
        return
    _enter(groups)
    try:
        yield
    finally:
        _leave()


def _enter(groups: Sequence[dist.ProcessGroup]) -> None:
    global _torchs_wait
    with _lock:
        if not _groups:
            _torchs_wait, dist.Work.wait = dist.Work.wait, _looking_wait
        _groups[threading.get_ident()] = groups


def _leave() -> None:
    with _lock:
        del _groups[threading.get_ident()]
        if not _groups and dist.Work.wait is _looking_wait:
            dist.Work.wait = _torchs_wait


def _looking_wait(work: dist.Work, *timeout: Any, **named: Any) -> Any:
    groups = _groups.get(threading.get_ident())
    if groups is None or timeout or named:
        return _torchs_wait(work, *timeout, **named)
    while True:
        try:
            return _torchs_wait(work, _LOOK)
        except RuntimeError:
            if work.is_completed():
                return _torchs_wait(work)  # raises where it was the work that failed, and not the wait
        if any(map(_C.abandonment_of, groups)):
            raise RuntimeError("a rank has given up the group")


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        return group._get_backend(device).name() == "gloo"
    except RuntimeError:
        return False  # none for the device
