"""A module that is wrapped again belongs to the new wrapper, whether the old one is still there or not."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from farandole.ddp._param_sync import ParamSync
    from farandole.ddp._wrapper import DistributedDataParallel

_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_syncs: weakref.WeakSet[ParamSync] = weakref.WeakSet()  # hooks of modules keep them, also after their wrapper


class _Retired:
    """In the place of the reducer of a wrapper whose parameters another one has."""

    def __init__(self, parameter: str) -> None:
        self._parameter = parameter

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"farandole.ddp: parameter '{self._parameter}' was wrapped again, by another DistributedDataParallel, which "
            "averages it now: expected that one, and an optimizer over it"
        )


def finish_gathers(parameters: Iterable[torch.Tensor]) -> None:
    """Before any of these is wrapped: what an optimizer has updated on other ranks is there, or its group given up."""
    taken = set(parameters)
    for sync in list(_syncs):
        if not taken.isdisjoint(sync.bucket_groups()):
            sync.finish_unless_abandoned()


def take_over(wrapper: DistributedDataParallel) -> None:
    """It has its parameters: who had any of them lets go, since two who reduce one gradient would do so at once."""
    taken = set(wrapper._trainable.values())
    for sync in list(_syncs):
        if not taken.isdisjoint(sync.bucket_groups()):
            sync.leave()
            _syncs.discard(sync)
    for other in list(_wrappers):
        name = next((name for name, parameter in other._trainable.items() if parameter in taken), None)
        if name is not None:
            retired: Any = _Retired(name)
            other._reducer = retired
            other._param_sync = None if other._param_sync is None else retired
            _wrappers.discard(other)
    _wrappers.add(wrapper)
    if wrapper._param_sync is not None:
        _syncs.add(wrapper._param_sync)


def wrappers() -> list[DistributedDataParallel]:
    """Those that have their parameters."""
    return list(_wrappers)


def wrapper_of(parameter: torch.Tensor) -> tuple[DistributedDataParallel | None, str]:
    """Which has it, and by what name; None where none has."""
    named = ((wrapper, item) for wrapper in list(_wrappers) for item in wrapper._trainable.items())
    return next(((wrapper, name) for wrapper, (name, one) in named if one is parameter), (None, ""))
