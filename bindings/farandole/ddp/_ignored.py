"""Parameters and buffers that stay each rank's own, by the mark that torch's DDP looks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

import torch

_T = TypeVar("_T", bound=torch.Tensor)

_NAMES = "_ddp_params_and_buffers_to_ignore"
_IGNORED = "_ddp_ignored"


def ignored_in(module: torch.nn.Module) -> frozenset[str]:
    """The names, in ``module``, of what it is marked to keep as each rank's own."""
    return frozenset(getattr(module, _NAMES, ()))


def ignore(module: torch.nn.Module, params_and_buffers_to_ignore: Collection[str]) -> None:
    """Has a wrapper that is made afterwards leave some alone: neither compared nor broadcast nor reduced.

    Args:
        module: that is to be wrapped.
        params_and_buffers_to_ignore: their names in it, as ``named_parameters()`` has them.
    """
    setattr(module, _NAMES, params_and_buffers_to_ignore)
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            if name in params_and_buffers_to_ignore:
                setattr(tensor, _IGNORED, True)


def named_parameters(module: torch.nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Those that are not ignored; one with several names by the first of these that is not."""
    if not ignored:
        return module.named_parameters()
    return _without(module.named_parameters(remove_duplicate=False), ignored)


def named_buffers(module: torch.nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """As :func:`named_parameters`."""
    if not ignored:
        return module.named_buffers()
    return _without(module.named_buffers(remove_duplicate=False), ignored)


def _without(named: Iterable[tuple[str, _T]], ignored: Collection[str]) -> Iterator[tuple[str, _T]]:
    seen: set[torch.Tensor] = set()
    for name, tensor in named:
        if name not in ignored and tensor not in seen:
            seen.add(tensor)
            yield name, tensor
