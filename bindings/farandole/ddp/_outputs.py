"""The tensors in what a forward returns."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(output: Any) -> list[torch.Tensor]:
    """In lists, tuples, dicts, dataclasses, and what is registered with torch's pytree, inside each other."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for leaf in _leaves_of(output) if isinstance(leaf, torch.Tensor)]


def hides_nothing(output: Any) -> bool:
    """Whether these are all its tensors: what is not looked into may have others."""
    known = (torch.Tensor, numbers.Number, str, type(None))
    return all(isinstance(leaf, known) for leaf in _leaves_of(output))


def _leaves_of(value: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, dict):  # of a type that is not registered
            yield from _leaves_of(list(leaf.values()))
        elif isinstance(leaf, (list, tuple)):
            yield from _leaves_of([*leaf])
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, torch.Tensor)):
            yield from _leaves_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf
