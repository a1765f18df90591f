"""Modules that ran ahead of a model's forward, and are not to run in it again."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch import nn


class PostProcessing:
    """Lets modules return in a forward what they returned when ``InputGraph.run`` called them for that batch.

    It replaces their ``forward`` until it is closed. Only the context (so, the thread) that is in ``replaying`` gets
    kept results; all others call the modules as ever, at the same time. Hooks of the modules run both times, around
    what is kept.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._kept: ContextVar[dict[str, deque[Any]] | None] = ContextVar("kept", default=None)
        self._noted: ContextVar[dict[str, list[Any]] | None] = ContextVar("noted", default=None)
        self._undo = contextlib.ExitStack()
        self.forwards: dict[str, Callable[..., Any]] = {}  # those of the modules now, by name
        for name in names:
            module = model.get_submodule(name)
            before = vars(module).get("forward")
            module.forward = self.forwards[name] = functools.partial(self._forward, name, module.forward)
            self._undo.callback(_restore, module, before)

    @contextlib.contextmanager
    def noting(self) -> Iterator[dict[str, list[Any]]]:
        """Inside, one run ahead of a batch; yields what the modules return in it, by name and in call order."""
        noted: dict[str, list[Any]] = {name: [] for name in self.forwards}
        token = self._noted.set(noted)
        try:
            yield noted
        finally:
            self._noted.reset(token)

    @contextlib.contextmanager
    def replaying(self, results: Mapping[str, Sequence[Any]]) -> Iterator[None]:
        """Inside, one forward of the batch whose results these are.

        Raises:
            RuntimeError: forward called one of the modules more often or more rarely than when it was traced.
        """
        kept = {name: deque(outputs) for name, outputs in results.items()}
        token = self._kept.set(kept)
        try:
            yield
        finally:
            self._kept.reset(token)
        left = [name for name, outputs in kept.items() if outputs]
        if left:
            raise RuntimeError(f"forward called {', '.join(map(repr, left))} more rarely than when it was traced")

    def close(self) -> None:
        self._undo.close()

    def _forward(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kept = self._kept.get()
        if kept is None or name not in kept:
            result = original(*args, **kwargs)
            if (noted := self._noted.get()) is not None:
                noted[name].append(result)
            return result
        if not kept[name]:
            raise RuntimeError(f"forward called {name!r} more often than when it was traced")
        return kept[name].popleft()


def _restore(module: nn.Module, before: Any) -> None:
    if before is None:
        del module.forward
    else:
        module.forward = before
