"""The tensors in what a forward returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(output: Any) -> list[torch.Tensor]:
    """In lists, tuples, dicts, dataclasses, and what is registered with torch's pytree, inside each other."""
    return [output] if isinstance(output, torch.Tensor) else list(_walk(output))


def _walk(value: Any) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, dict):  # of a type that is not registered
            yield from _walk(list(leaf.values()))
        elif isinstance(leaf, (list, tuple)):
            yield from _walk([*leaf])
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _walk([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
