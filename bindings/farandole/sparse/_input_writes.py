"""Whether what a sharded module was given ahead has been written to since."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from farandole._C import write_counts
from farandole.sparse._input_equality import has_same_values


class InputWrites:
    """How often each tensor among inputs has been written to, by the time this is made.

    What features have not yet is no part of it: offsets that somebody asks for later are no write. Lengths they have
    from here on, which an input_dist would make of their offsets.

    Args:
        inputs: tensors, features, and containers of them.
        by_value: looks at copies of the tensors as well: torch counts no writes by numpy, or to a tensor's data.
    """

    __slots__ = ("_counts", "_inputs", "_is_flat", "_tensors", "copies")

    def __init__(self, inputs: Iterable[Any], by_value: bool = False) -> None:
        self._inputs = inputs
        self._tensors, self._is_flat = _tensors_in(inputs)
        self._counts = write_counts(self._tensors)
        self.copies = [None if part is None else part.detach().clone() for part in self._tensors] if by_value else ()

    def found_any(self) -> bool:
        if self._is_flat and not self.copies:
            return write_counts(self._tensors) != self._counts
        now, _ = _tensors_in(self._inputs)  # containers may have others
        if len(now) != len(self._tensors):
            return True
        counts = zip(self._counts, write_counts(now), strict=True)
        if any(one is not None and one != other for one, other in counts):
            return True
        return any(
            one is not None and other is not None and not has_same_values(one, other)
            for one, other in zip(self.copies, now, strict=False)
        )


def is_by_value(number: int) -> bool:
    """Whether the inputs of this batch are looked at so: what writes past torch's counts does so from the first ones on,
    or often."""
    return number < 2 or number % 16 == 0


def _tensors_in(inputs: Iterable[Any]) -> tuple[list[torch.Tensor | None], bool]:
    """Those of features with None for what they lack; and whether none is in a container."""
    found: list[torch.Tensor | None] = []
    todo, seen, is_flat = [*inputs], set(), True
    while todo:
        item = todo.pop()
        type_: Any = type(item)
        kind = _kind_of(type_)
        if kind is _TENSOR:
            found.append(item)
            continue
        if kind is _OTHER or id(item) in seen:
            continue
        seen.add(id(item))
        if kind is _FEATURES:
            found += [item.values(), item.weights_or_none(), item.lengths(), item.offsets_or_none()]
            continue
        is_flat = False
        todo += item if kind is _SEQUENCE else item.values()
    return found, is_flat


_TENSOR, _SEQUENCE, _DICT, _FEATURES, _OTHER = "tensor", "sequence", "dict", "features", "other"


@functools.lru_cache(maxsize=1024)
def _kind_of(kind: type) -> str:
    if issubclass(kind, torch.Tensor):
        return _TENSOR
    if issubclass(kind, (list, tuple)):
        return _SEQUENCE
    if issubclass(kind, dict):
        return _DICT
    return _FEATURES if hasattr(kind, "weights_or_none") else _OTHER  # torchrec's
