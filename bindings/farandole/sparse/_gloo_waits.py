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


@contextlib.contextmanager
def looking_after(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """Inside, this thread's waits end soon after another rank has given up one of these groups, where all are gloo's:
    other works may not outlive a wait that has run out of time.

    Raises:
        RuntimeError: from such a wait.
    """
    if not groups or not all(map(_is_gloo, groups)):
        yield
        return
    thread, original = threading.get_ident(), dist.Work.wait

    def wait(work: dist.Work, *timeout: Any, **named: Any) -> Any:
        if threading.get_ident() != thread or timeout or named:
            return original(work, *timeout, **named)
        while True:
            try:
                return original(work, _LOOK)
            except RuntimeError:
                if work.is_completed():
                    return original(work)  # raises where it was the work that failed, and not the wait
            if any(map(_C.abandonment_of, groups)):
                raise RuntimeError("a rank has given up the group")

    dist.Work.wait = wait
    try:
        yield
    finally:
        dist.Work.wait = original


def _is_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False  # none for CPU
