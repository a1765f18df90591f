"""Batches of any kind: tensors, what has ``to`` (torchrec's Pipelineable), and containers of these."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all it holds on ``device``, copied without waiting where the device allows it.

    Raises:
        TypeError: neither the batch nor all that it holds, as tuple, list, dict or dataclass, has ``to``.
    """
    return _mapped(batch, lambda part: part.to(device=device, non_blocking=True), "to")


def record_stream(batch: Any, stream: torch.Stream) -> None:
    """Tells the allocator that ``stream`` uses what the batch holds."""

    def record(part: Any) -> Any:
        part.record_stream(stream)
        inverse = getattr(part, "inverse_indices_or_none", lambda: None)()
        if inverse is not None:  # of torchrec's features, which leave it out
            inverse[1].record_stream(stream)
        return part

    _mapped(batch, record, "record_stream")


_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


def _mapped(value: Any, change: Callable[[Any], Any], method: str) -> Any:
    if isinstance(value, torch.Tensor) or callable(getattr(value, method, None)):
        return change(value)
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(part, change, method) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(part, change, method) for part in value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # of any kind of dict
        changed.update((key, _mapped(part, change, method)) for key, part in value.items())
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _mapped(getattr(value, f.name), change, method) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **parts)
    raise TypeError(
        f"a batch holds a {type(value).__name__}, which has no {method}(): expected tensors, objects with to() and "
        "record_stream(), or tuples, lists, dicts and dataclasses of these"
    )
