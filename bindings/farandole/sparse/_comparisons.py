"""In which forwards the values of inputs are compared with those that went ahead."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import nn

from farandole.sparse._batch_paths import everything_in
from farandole.sparse._sharded import wrapped_name

_EVERY = 16
_DEPTH, _PARTS = 3, 256  # of a batch
_MOST = 1024  # kinds of forwards that are remembered
_SETTINGS = (bool, int, float, str, type(None))


class Comparisons:
    """In the first one of each kind, since fx takes what a forward asks for settled once, and in every 16th.

    Of one kind are forwards with equal settings (attributes of the modules that fx went through which are bools,
    numbers, strings or None) of batches whose parts have the same types.
    """

    def __init__(self, model: nn.Module, sharded: Iterable[str]) -> None:
        above = {""}
        for name in sharded:
            path = name.split(".")
            above |= {".".join(path[:length]) for length in range(1, len(path))}
        traced = [model.get_submodule(name) for name in sorted(above)]
        self._traced = [module for module in traced if wrapped_name(module) is None]
        self._known: set[int] = set()
        self._kind = 0
        self._since = 0

    def begin(self, batch: Any) -> bool:
        """Whether the forward of this batch is one."""
        settings = tuple(
            (key, value)
            for module in self._traced
            for key, value in vars(module).items()
            if isinstance(value, _SETTINGS)
        )
        parts = islice(everything_in(batch, _DEPTH), _PARTS)
        self._kind = hash((settings, tuple(type(part) for _, part in parts)))
        return self._kind not in self._known or self._since >= _EVERY - 1

    def end(self, has_compared: bool) -> None:
        """That forward has gone well."""
        self._since = 0 if has_compared else self._since + 1
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known.add(self._kind)

    def forget(self) -> None:
        """The model has changed."""
        self._known.clear()
