"""Autocast, which torch keeps by thread, of the CPU and the accelerator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


class Autocast:
    """As it is on this thread when it is made."""

    def __init__(self) -> None:
        self._state = _state()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """On any thread."""
        before = _state()
        if before == self._state:
            yield
            return
        # Not torch.autocast: the end of an outermost one empties the cache, which is that of all threads.
        is_on = any(is_enabled for _, is_enabled, _ in self._state[1])
        if is_on:
            torch.autocast_increment_nesting()
        _set(self._state)
        try:
            yield
        finally:
            _set(before)
            if is_on:
                torch.autocast_decrement_nesting()


State = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]


@functools.cache
def _kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _state() -> State:
    """Whether casts are cached; by kind of device whether it is on, and to what it casts."""
    return torch.is_autocast_cache_enabled(), tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()
    )


def _set(state: State) -> None:
    has_cache, kinds = state
    torch.set_autocast_cache_enabled(has_cache)
    for kind, is_enabled, dtype in kinds:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
