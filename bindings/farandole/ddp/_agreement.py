"""What goes wrong on one rank goes wrong on all, so that none waits for one that has left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from farandole import _C

Facts = list[tuple[str, str]]  # what must be the same on all ranks, e.g. ("optimizer", "AdamW")


@contextlib.contextmanager
def raising_together(
    replicas: Sequence[dist.ProcessGroup | None], others: Sequence[dist.ProcessGroup | None], device: torch.device
) -> Iterator[Facts]:
    """Where what is inside raises on some ranks, it raises on all: there a ValueError with the rank and its reason.

    A collective of all these groups, in this order: what one of them learns the next is told, which is all ranks of a
    grid. Yields facts to be filled in, which ``replicas`` must have in common.
    """
    facts: Facts = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as raised:
        error = raised
    for group in dict.fromkeys((*replicas, *others)):
        if group is None or group.size() == 1:
            continue
        try:
            _C.check_agreement(group, device, facts if group in replicas else [], _reason(error))
        except ValueError as theirs:
            error = error or theirs
    if error is not None:
        raise error


def _reason(error: Exception | None) -> str:
    """Empty when all is well."""
    return "" if error is None else str(error) or repr(error)
