"""Whether what a forward gives a sharded module is what has gone ahead."""

from __future__ import annotations

import functools
from typing import Any

import torch


def is_same_part(ahead: Any, now: Any) -> bool:
    """The same object, or a container of the same objects, or an equal constant."""
    return ahead is now or _compared(ahead, now, lambda one, other: False)


def is_alike(ahead: Any, now: Any) -> bool:
    """Of the same types, keys, shapes and constants, whatever tensors hold; without waiting for a device."""
    return ahead is now or _compared(ahead, now, _are_alike)


def is_equal_input(ahead: Any, now: Any) -> bool:
    """Equal tensors and features too; objects of other kinds are taken for equal where their types are."""
    return ahead is now or _compared(ahead, now, _are_equal)


Versions = tuple[int | None, ...]
Copies = tuple[torch.Tensor | None, ...]


def versions_of(call: Any) -> Versions:
    """How often each tensor in it has been written to; None for what features do not have, or not yet. Lengths they
    have from here on: an input_dist would make them of their offsets."""
    return tuple([None if part is None else 0 if part.is_inference() else part._version for part in _tensors_in(call)])


def copies_of(call: Any) -> Copies:
    """The same tensors, as they are now."""
    return tuple(None if part is None else part.detach().clone() for part in _tensors_in(call))


def _tensors_in(call: Any) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    todo, seen = [call], set()
    while todo:
        item = todo.pop()
        type_: Any = type(item)
        kind = _kind_of(type_)
        if kind is _TENSOR:
            found.append(item)
        if kind is _TENSOR or kind is _OTHER or id(item) in seen:
            continue
        seen.add(id(item))
        if kind is _SEQUENCE:
            todo += item
        elif kind is _DICT:
            todo += item.values()
        else:
            found += [item.values(), item.weights_or_none(), item.lengths(), item.offsets_or_none()]
    return found


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


def were_written(before: Versions, now: Versions) -> bool:
    """What has come since is no write: offsets that somebody has asked for."""
    return len(before) != len(now) or any(
        one is not None and one != other for one, other in zip(before, now, strict=True)
    )


def is_to_be_copied(number: int) -> bool:
    """Whether the inputs of this batch are: what writes past torch's counts does so from the first ones on, or often."""
    return number < 2 or number % 16 == 0


def differ(before: Copies, call: Any) -> bool:
    """Whether these tensors have other values: torch counts no writes by numpy, or to a tensor's data."""
    return any(
        one is not None and other is not None and not has_same_values(one, other)
        for one, other in zip(before, _tensors_in(call), strict=True)
    )


def has_same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """With nan where the other one has it."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype and torch.equal(one, other):  # one pass, and most often so
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _compared(ahead: Any, now: Any, of_objects: Any) -> bool:
    def same(one: Any, other: Any) -> bool:
        return one is other or _compared(one, other, of_objects)

    if isinstance(ahead, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(ahead) == len(now) and all(map(same, ahead, now))
    if isinstance(ahead, dict) and isinstance(now, dict):
        return ahead.keys() == now.keys() and all(same(ahead[key], now[key]) for key in ahead)
    if isinstance(ahead, (bool, int, float, str)):
        return type(ahead) is type(now) and ahead == now
    return of_objects(ahead, now)


def _are_alike(ahead: Any, now: Any) -> bool:
    if type(ahead) is not type(now):
        return False
    if isinstance(ahead, torch.Tensor):
        return ahead.shape == now.shape and ahead.dtype == now.dtype
    if hasattr(ahead, "weights_or_none"):  # torchrec's features
        return (
            _keys(ahead) == _keys(now)
            and _are_alike(ahead.values(), now.values())
            and is_alike(ahead.weights_or_none(), now.weights_or_none())
        )
    return True


def _are_equal(ahead: Any, now: Any) -> bool:
    if type(ahead) is not type(now):
        return False
    if isinstance(ahead, torch.Tensor):
        return ahead.shape == now.shape and torch.equal(ahead, now)
    if hasattr(ahead, "weights_or_none"):  # torchrec's features
        return (
            _keys(ahead) == _keys(now)
            and _are_equal(ahead.values(), now.values())
            and _are_equal(ahead.lengths(), now.lengths())
            and is_equal_input(ahead.weights_or_none(), now.weights_or_none())
            and _strides(ahead) == _strides(now)
        )
    return True


def _keys(features: Any) -> list[str]:
    """None of a JaggedTensor, which is one feature."""
    return list(features.keys()) if hasattr(features, "keys") else []


def _strides(features: Any) -> list[int]:
    return list(features.stride_per_key()) if hasattr(features, "stride_per_key") else []
