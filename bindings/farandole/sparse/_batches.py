"""Batches of any kind: tensors, what has ``to`` (torchrec's Pipelineable), and containers of these."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch

from farandole.sparse._batch_paths import CONSTANTS
from farandole.sparse._containers import attributes_of, shallow_copy, tuple_like


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all it holds on ``device``, copied without waiting where the device allows it.

    Lists, dicts and dataclasses are copied, whatever moves, so that an iterator may fill the same one again; with their
    types and attributes, and without ``__init__`` or ``__post_init__``. What a class makes in its ``__post_init__``,
    and attributes that are no fields, move where they have ``to`` and ``record_stream``, else they stay as they are.

    Raises:
        TypeError: nothing in the batch has ``to``, or one that returns None; or some of what it holds, as tuple, list,
            dict or dataclass, has none.
    """
    kind: Any = type(batch)
    if _moves_itself(kind):
        return _moved(batch, device)
    mover = _Mover(device)
    moved = mover.moved(batch)
    if not mover.has_moved:
        raise TypeError(f"the batch is a {_described(batch)}: expected {_EXPECTED}, with a tensor in it")
    return moved


def record_stream(batch: Any, stream: torch.Stream) -> None:
    """Tells the allocator that ``stream`` uses what the batch holds."""
    for part in _parts(batch, set()):
        part.record_stream(stream)
        inverse = getattr(part, "inverse_indices_or_none", lambda: None)()
        if inverse is not None:  # of torchrec's features, which leave it out
            inverse[1].record_stream(stream)


@functools.lru_cache(maxsize=1024)
def _moves_itself(kind: type) -> bool:
    return not issubclass(kind, CONSTANTS) and callable(getattr(kind, "to", None))


def _moved(value: Any, device: torch.device) -> Any:
    moved = value.to(device=device, non_blocking=True)
    if moved is None:
        raise TypeError(f"{type(value).__name__}.to() returned None: expected the same with all it holds on the device")
    return moved


_EXPECTED = "tensors, objects with to() and record_stream(), or tuples, lists, dicts and dataclasses of these"


class _Mover:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._within: dict[int, Any] = {}  # what becomes of containers, to which attributes may lead back
        self.has_moved = False

    def moved(self, value: Any, is_asked: bool = True) -> Any:
        """What cannot be moved is refused where it is asked for, else as it is."""
        if isinstance(value, torch.Tensor):
            return self._to(value)
        if isinstance(value, CONSTANTS):
            return value
        if _has(value, "to") and (is_asked or (_has(value, "record_stream") and not isinstance(value, type))):
            return self._to(value)
        is_container = isinstance(value, (tuple, list, dict)) or _is_dataclass(value)
        if not is_container and is_asked:
            raise _refusal(value, "to")
        if not is_container or id(value) in self._within:
            return self._within.get(id(value), value)
        try:
            return self._container(value, is_asked)
        finally:
            self._within.pop(id(value), None)

    def _to(self, value: Any) -> Any:
        self.has_moved = True
        return _moved(value, self._device)

    def _container(self, value: Any, is_asked: bool) -> Any:
        is_new = is_asked and not isinstance(value, tuple)
        result = self._within[id(value)] = shallow_copy(value) if is_new else value
        attributes = self._changed_attributes(value)
        if isinstance(value, (tuple, list)):
            parts = [self.moved(part, is_asked) for part in value]
            if is_new or attributes or not all(map(operator.is_, parts, value)):
                if isinstance(value, tuple):
                    result = tuple_like(value, parts)
                else:
                    result = result if is_new else shallow_copy(value)
                    list.__setitem__(result, slice(None), parts)
        else:
            changed = self._changed_items(value, is_asked)
            if not is_new and (attributes or changed):
                result = shallow_copy(value)
            for name, new in changed.items():
                if isinstance(value, dict):
                    dict.__setitem__(result, name, new)  # of any kind of dict, which keeps its order
                else:
                    object.__setattr__(result, name, new)  # of frozen ones, too
        if attributes:
            result.__dict__.update(attributes)
        return result

    def _changed_items(self, value: Any, is_asked: bool) -> dict[Any, Any]:
        if not isinstance(value, dict):
            return self._changed_fields(value, is_asked)
        changed = {key: self.moved(part, is_asked) for key, part in value.items()}
        return {key: new for key, new in changed.items() if new is not dict.__getitem__(value, key)}

    def _changed_fields(self, value: Any, is_asked: bool) -> dict[str, Any]:
        changed = {}
        for f in dataclasses.fields(value):
            if not hasattr(value, f.name):
                continue
            part = getattr(value, f.name)
            is_made = not f.init and hasattr(type(value), "__post_init__")
            new = self.moved(part, is_asked and not is_made)
            if is_made and new is part and self._is_left_behind(part):
                raise _refusal(part, "to")
            if new is not part:
                changed[f.name] = new
        return changed

    def _changed_attributes(self, value: Any) -> dict[str, Any]:
        attributes = attributes_of(value)
        if not attributes:
            return {}
        fields = () if isinstance(value, (tuple, list, dict)) else {f.name for f in dataclasses.fields(value)}
        changed = {name: self.moved(part, False) for name, part in attributes.items() if name not in fields}
        return {name: new for name, new in changed.items() if new is not attributes[name]}

    # An object without to(), with tensors of another device.
    def _is_left_behind(self, value: Any) -> bool:
        parts = () if isinstance(value, CONSTANTS) else attributes_of(value).values()
        return any(isinstance(part, torch.Tensor) and part.device.type != self._device.type for part in parts)


def _parts(value: Any, within: set[int], is_asked: bool = True) -> Iterator[Any]:
    if isinstance(value, torch.Tensor) or (_has(value, "record_stream") and (is_asked or not isinstance(value, type))):
        yield value
        return
    if isinstance(value, CONSTANTS) or id(value) in within:
        return
    fields = dataclasses.fields(value) if _is_dataclass(value) else ()
    if not fields and not isinstance(value, (tuple, list, dict)):
        if is_asked:
            raise _refusal(value, "record_stream")
        return
    within.add(id(value))
    if isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part, within, is_asked)
        fields = ()
    for f in fields:
        if hasattr(value, f.name):
            # What __post_init__ makes may be of any kind.
            yield from _parts(getattr(value, f.name), within, is_asked and f.init)
    names = {f.name for f in fields}
    for name, part in attributes_of(value).items():
        if name not in names:
            yield from _parts(part, within, False)
    within.discard(id(value))


def _has(value: Any, method: str) -> bool:
    try:
        return callable(getattr(value, method, None))
    except LookupError:  # of a dict whose __getattr__ is its __getitem__
        return False


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _described(batch: Any) -> str:
    kind = type(batch).__name__
    if isinstance(batch, (tuple, list, dict)) and batch:
        held = batch.values() if isinstance(batch, dict) else batch
        return f"{kind} of {', '.join(sorted({type(part).__name__ for part in held}))}"
    return kind


def _refusal(value: Any, method: str) -> TypeError:
    return TypeError(f"a batch holds a {type(value).__name__}, which has no {method}(): expected {_EXPECTED}")
