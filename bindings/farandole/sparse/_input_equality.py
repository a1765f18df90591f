"""Whether what a forward gives a sharded module is what has gone ahead."""

from __future__ import annotations

import operator
from typing import Any

import torch


def are_same_arguments(ahead: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    """Whether they are the same objects, all by place; False where some are by name, which is left to others."""
    return not ahead[1] and not now[1] and len(ahead[0]) == len(now[0]) and all(map(operator.is_, ahead[0], now[0]))


def is_same_part(ahead: Any, now: Any) -> bool:
    """The same object, or a container of the same objects, or an equal constant."""
    return ahead is now or _compared(ahead, now, lambda one, other: False)


def is_alike(ahead: Any, now: Any) -> bool:
    """Of the same types, keys, shapes and constants, whatever tensors hold; without waiting for a device."""
    return ahead is now or _compared(ahead, now, _are_alike)


def is_equal_input(ahead: Any, now: Any) -> bool:
    """Equal tensors and features too; objects of other kinds are taken for equal where their types are."""
    return ahead is now or _compared(ahead, now, _are_equal)


def has_same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """With nan where the other one has it."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype and torch.equal(one, other):  # one pass, and most often so
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def is_whole(tensor: torch.Tensor) -> bool:
    """Writes to a part of a larger one count for all others."""
    has_memory = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return not has_memory or tensor.untyped_storage().nbytes() <= tensor.nbytes


def copy_of_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """What decides where a write to another part of its memory has counted for it, too. On a device batches have memory
    of their own."""
    return tensor.detach().clone() if tensor.is_cpu and not is_whole(tensor) else None


def is_written(tensor: torch.Tensor, version: int, copied: torch.Tensor | None) -> bool:
    """Since it had this version, and was like that copy of a part."""
    return version_of(tensor) != version and (copied is None or not has_same_values(copied, tensor))


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
