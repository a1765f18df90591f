"""Whether what a sharded module was given ahead has been written to since."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from farandole._C import write_counts
from farandole.sparse._input_equality import copy_of_part, has_same_values


class InputWrites:
    """How often each tensor among inputs has been written to, by the time this is made.

    What features have not yet is no part of it: offsets that somebody asks for later are no write. Lengths they have
    from here on, which an input_dist would make of their offsets. A tensor that is a part of a larger one is copied,
    since writes to all other parts count as well: where they do, values decide.

    Args:
        inputs: tensors, features, and containers of them.
        by_value: looks at copies of the tensors as well: torch counts no writes by numpy, or to a tensor's data.
        may_be_others: takes writes to other parts of the same memory for writes, and copies nothing for them.
    """

    __slots__ = ("_by_value", "_counts", "_inputs", "_is_flat", "_tensors", "copies")

    def __init__(self, inputs: Iterable[Any], by_value: bool = False, may_be_others: bool = False) -> None:
        self._inputs = inputs
        self._by_value = by_value
        self._tensors, self._is_flat = _tensors_in(inputs)
        self._counts = write_counts(self._tensors)
        self.copies: list[torch.Tensor | None] = []
        if by_value:
            self.copies = [None if part is None else part.detach().clone() for part in self._tensors]
        elif not may_be_others:
            self.copies = [None if part is None else copy_of_part(part) for part in self._tensors]

    def found_any(self) -> bool:
        is_flat = self._is_flat and not self._by_value
        now = self._tensors if is_flat else _tensors_in(self._inputs)[0]  # containers may have others
        if len(now) != len(self._tensors):
            return True
        counts = write_counts(now)
        if counts != self._counts and any(map(self._is_other, range(len(now)), now, counts)):
            return True
        return self._by_value and not all(map(_is_as_copied, self.copies, now))

    def _is_other(self, index: int, now: torch.Tensor | None, count: int | None) -> bool:
        before = self._counts[index]
        if before is None or before == count:
            return False
        copied = self.copies[index] if self.copies else None
        return now is not self._tensors[index] or copied is None or not _is_as_copied(copied, now)


def _is_as_copied(copied: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    return copied is None or now is None or has_same_values(copied, now)


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
