"""In which forwards the values of inputs are compared with those that went ahead."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import nn

from farandole.sparse._batch_paths import everything_in
from farandole.sparse._input_equality import version_of
from farandole.sparse._sharded import wrapped_name

_EVERY = 16
_DEPTH, _PARTS = 3, 256  # of a batch
_MOST = 1024  # kinds of forwards that are remembered
_SETTINGS = (bool, int, float, str, type(None))


class Comparisons:
    """In the first one of each kind, since fx takes what a forward asks for settled once, and in every 16th.

    Of one kind are forwards with equal settings (attributes of the modules that fx went through which are bools,
    numbers, strings or None, and those which are tensors that nobody has written to) of batches whose parts have the same
    types.

    Args:
        sharded: names of the modules whose inputs are compared.
        read: names of the model's attributes that these are computed with.
    """

    def __init__(self, model: nn.Module, sharded: Iterable[str], read: Iterable[str]) -> None:
        self._model = model
        self._read = [operator.attrgetter(name) for name in read]
        above = {""}
        for name in sharded:
            path = name.split(".")
            above |= {".".join(path[:length]) for length in range(1, len(path))}
        traced = [model.get_submodule(name) for name in sorted(above)]
        self._attributes = [_Attributes(module) for module in traced if wrapped_name(module) is None]
        self._known: set[int] = set()
        self._kind = 0
        self._since = 0

    def begin(self, batch: Any) -> bool:
        """Whether the forward of this batch is one."""
        tensors = [tensor for attributes in self._attributes for tensor in attributes.follow()]
        settings = tuple([attributes.settings for attributes in self._attributes])
        read = [value for value in (get(self._model) for get in self._read) if isinstance(value, torch.Tensor)]
        versions = tuple([(id(tensor), version_of(tensor)) for tensor in (*read, *tensors)])
        parts = islice(everything_in(batch, _DEPTH), _PARTS)
        self._kind = hash((settings, versions, tuple([type(part) for _, part in parts])))
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


class _Attributes:
    """Those of a module that are settings or tensors; looked for anew where others have come, or a setting has changed."""

    def __init__(self, module: nn.Module) -> None:
        self._held = vars(module)
        self._kinds: list[type] = []
        self._names: list[str] = []
        self._places: list[int] = []  # of settings
        self._values: list[Any] = []
        self._tensors: list[int] = []  # places
        self.settings: tuple[tuple[str, Any], ...] = ()

    def follow(self) -> list[torch.Tensor]:
        """The tensors; ``settings`` are those of now."""
        held = [*self._held.values()]
        kinds = [*map(type, held)]
        if kinds != self._kinds or [*self._held] != self._names:
            self._kinds, self._names = kinds, [*self._held]
            self._places = [place for place, value in enumerate(held) if isinstance(value, _SETTINGS)]
            self._tensors = [place for place, value in enumerate(held) if isinstance(value, torch.Tensor)]
            self._values = []
        values = [held[place] for place in self._places]
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            self._values = values
            self.settings = tuple([(self._names[place], held[place]) for place in self._places])
        return [held[place] for place in self._tensors]
