"""What goes wrong on one rank goes wrong on all, so that none waits for one that has left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from farandole import _C
from farandole.ddp._ignored import ignored_in, named_parameters

Facts = list[tuple[str, str]]  # what must be the same on all ranks, e.g. ("optimizer", "AdamW")


@contextlib.contextmanager
def raising_together(
    replicas: Sequence[dist.ProcessGroup | None], others: Sequence[dist.ProcessGroup | None], device: torch.device
) -> Iterator[Facts]:
    """Where what is inside raises on some ranks, it raises on all: there a ValueError with the rank and its reason.

    A collective of all these groups, in this order: what one of them learns the next is told, which is all ranks of a
    grid. Yields facts to be filled in, which ``replicas`` must have in common. ``device`` is where a group without a
    backend for the CPU exchanges them.
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
            where = torch.device("cpu") if _has_cpu(group) else device
            _C.check_agreement(group, where, facts if group in replicas else [], _reason(error))
        except ValueError as theirs:
            error = error or theirs
    if error is not None:
        raise error


@contextlib.contextmanager
def refusing_together(module: torch.nn.Module, replicas: Sequence[dist.ProcessGroup | None]) -> Iterator[None]:
    """Around what comes before a GradReducer is made: where it raises on some ranks, making it raises on the others.

    No collective where all is well: an error takes part in the one by which reducers agree on their models.
    """
    try:
        yield
    except Exception as error:
        for group in replicas:
            if group is not None and group.size() > 1:
                with contextlib.suppress(ValueError):  # what is told to the others, which may have told as much
                    _C.check_agreement(group, _device_of(module, group), [], _reason(error))
        raise


def _device_of(module: torch.nn.Module, group: dist.ProcessGroup) -> torch.device:
    """Where reducers agree on such a module: ``exchangeDevice`` in ddp/grad_reducer_creation.cc."""
    devices = group._device_types
    if not devices or _has_cpu(group):
        return torch.device("cpu")
    if not isinstance(module, torch.nn.Module):  # which is refused
        return devices[0]
    named = named_parameters(module, ignored_in(module))
    first = next((parameter for _, parameter in named if parameter.requires_grad), None)
    return devices[0] if first is None or first.is_meta else first.device


def _has_cpu(group: dist.ProcessGroup) -> bool:
    return torch.device("cpu") in group._device_types


def _reason(error: Exception | None) -> str:
    """Empty when all is well."""
    return "" if error is None else str(error) or repr(error)
