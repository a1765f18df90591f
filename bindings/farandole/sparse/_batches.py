"""Batches of any kind: tensors, what has ``to`` (torchrec's Pipelineable), and containers of these."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all it holds on ``device``, copied without waiting where the device allows it. Of a dataclass,
    ``__post_init__`` makes anew what it makes.

    Raises:
        TypeError: neither the batch nor all that it holds, as tuple, list, dict or dataclass, has ``to``.
    """
    return _mapped(batch, lambda part: part.to(device=device, non_blocking=True))


def record_stream(batch: Any, stream: torch.Stream) -> None:
    """Tells the allocator that ``stream`` uses what the batch holds."""
    for part in _parts(batch):
        part.record_stream(stream)
        inverse = getattr(part, "inverse_indices_or_none", lambda: None)()
        if inverse is not None:  # of torchrec's features, which leave it out
            inverse[1].record_stream(stream)


_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor) or callable(getattr(value, "to", None)):
        return change(value)
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(part, change) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(part, change) for part in value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # of any kind of dict
        changed.update((key, _mapped(part, change)) for key, part in value.items())
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _mapped(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        moved = dataclasses.replace(value, **parts)
        for f in dataclasses.fields(value):
            if not f.init and hasattr(value, f.name) and _is_unset(moved, f):
                object.__setattr__(moved, f.name, _mapped(getattr(value, f.name), change))  # frozen ones, too
        return moved
    raise _refusal(value, "to")


def _is_unset(value: Any, f: dataclasses.Field[Any]) -> bool:
    """Has ``__post_init__`` left the field as it is by default?"""
    if not hasattr(type(value), "__post_init__") or not hasattr(value, f.name):
        return True
    return f.default is not dataclasses.MISSING and getattr(value, f.name) is f.default


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor) or callable(getattr(value, "record_stream", None)):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _parts(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _parts(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            # What __post_init__ makes may be of any kind.
            with contextlib.nullcontext() if f.init else contextlib.suppress(TypeError, AttributeError):
                yield from _parts(getattr(value, f.name))
    elif not isinstance(value, _CONSTANTS):
        raise _refusal(value, "record_stream")


def _refusal(value: Any, method: str) -> TypeError:
    return TypeError(
        f"a batch holds a {type(value).__name__}, which has no {method}(): expected tensors, objects with to() and "
        "record_stream(), or tuples, lists, dicts and dataclasses of these"
    )
