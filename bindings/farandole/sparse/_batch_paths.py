"""Where things lie in a batch: by attributes and items from the batch itself."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from farandole.sparse._input_equality import copy_of_part, is_written, version_of

Step = tuple[Callable[[Any, Any], Any], Any]  # getattr or getitem, and the name or key
Path = tuple[Step, ...]

# Their classes with plain attributes (KeyedJaggedTensor, for one) keep some that come and go as they are used.
_OPAQUE_SOURCES = ("torch", "torchrec", "fbgemm_gpu")
_DEEPEST, _MOST, _FEW = 5, 1000, 8

# What is known by its value, and not as an object.
CONSTANTS = (type(None), int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


def follow(batch: Any, path: Path) -> Any:
    for function, key in path:
        batch = function(batch, key)
    return batch


def path_name(path: Path) -> str:
    return "batch" + "".join(f".{key}" if function is getattr else f"[{key!r}]" for function, key in path)


def parts(value: Any) -> Iterator[tuple[Step, Any]]:
    """Fields of dataclasses and namedtuples, items of dicts, lists and tuples, attributes of plain objects."""
    if is_constant(value) or isinstance(value, torch.Tensor):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield (operator.getitem, key), item
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield (getattr, name), getattr(value, name)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield (operator.getitem, index), item
    elif isinstance(value, (type, torch.nn.Module)):
        return
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield (getattr, field.name), getattr(value, field.name)
    elif not _is_opaque(value):
        for name, item in getattr(value, "__dict__", {}).items():
            yield (getattr, name), item


def everything_in(batch: Any, depth: int) -> Iterator[tuple[Path, Any]]:
    """The batch and all in it, what is nearer first; what contains itself is not entered again."""
    level: list[tuple[Path, Any, tuple[int, ...]]] = [((), batch, ())]
    for _ in range(depth + 1):
        below = []
        for path, value, above in level:
            yield path, value
            if id(value) not in above:
                below += [((*path, step), item, (*above, id(value))) for step, item in parts(value)]
        level = below


def types_in(batch: Any, depth: int, most: int) -> list[type]:
    """Of what everything_in() yields, so many at most; what contains itself is entered again, down to that depth."""
    found: list[type] = []
    level = [batch]
    while level and depth >= 0 and len(found) < most:
        types = [*map(type, level)]
        found += types
        below: list[Any] = []
        for value, kind in zip(level, types, strict=True):
            items = _items_of(kind)
            if items is not None:
                below += items(value)
        level = below
        depth -= 1
    return found[:most]


@functools.lru_cache(maxsize=1024)
def _items_of(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    """What gives the items of parts() for values of a type; None where there are none."""
    if issubclass(kind, (*CONSTANTS, torch.Tensor, type, torch.nn.Module)):
        return None
    if issubclass(kind, Mapping):
        return operator.methodcaller("values")
    if issubclass(kind, (list, tuple)):
        return iter
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return lambda value: [getattr(value, name) for name in names if hasattr(value, name)]
    if _is_of_libraries(kind):
        return None
    return lambda value: getattr(value, "__dict__", {}).values()


def tensors_in(batch: Any, holders: list[Any] | None = None) -> list[tuple[Path, Step | None, torch.Tensor]]:
    """With the path of what holds each, and the step from there; those of opaque objects too. What is nearer first, and
    not all where a batch leads to everything else.

    Args:
        holders: gets all whose parts were looked at and may become others.
    """
    if isinstance(batch, torch.Tensor):
        return [((), None, batch)]
    found: list[tuple[Path, Step | None, torch.Tensor]] = []
    todo: list[tuple[Path, Any]] = [((), batch)]
    for path, value in todo:
        type_: Any = type(value)
        kind = _kind_of(type_)
        if len(path) > _DEEPEST or len(todo) > _MOST:
            continue
        if holders is not None and not isinstance(value, tuple):
            holders.append(value)
        for step, item in _held(value, kind):
            type_ = type(item)
            kind_within = _kind_of(type_)
            if kind_within is _TENSOR:
                found.append((path, step, item))
            elif kind_within is not _CONSTANT and kind is not _OPAQUE:
                todo.append(((*path, step), item))
    return found


def _held(value: Any, kind: str) -> Iterable[tuple[Step, Any]]:
    if kind is _OBJECT or kind is _OPAQUE:
        return [((getattr, name), item) for name, item in vars(value).items()]
    if kind is not _SEQUENCE or hasattr(value, "_fields"):
        return parts(value)
    if len(value) > _FEW and _is_of_constants(value):
        return ()
    return [((operator.getitem, place), item) for place, item in enumerate(value)]


_TENSOR, _CONSTANT, _SEQUENCE, _PARTS, _OPAQUE, _OBJECT = "tensor", "constant", "sequence", "parts", "opaque", "object"


@functools.lru_cache(maxsize=1024)
def _kind_of(kind: type) -> str:
    """Constant: or what is no part of a batch."""
    if issubclass(kind, torch.Tensor):
        return _TENSOR
    if issubclass(kind, (*CONSTANTS, type, torch.nn.Module)):
        return _CONSTANT
    if issubclass(kind, (list, tuple)):
        return _SEQUENCE
    if issubclass(kind, Mapping) or kind.__dictoffset__ == 0:  # slots
        return _PARTS
    return _OPAQUE if _is_of_libraries(kind) else _OBJECT


def _is_of_constants(value: Any) -> bool:
    """Maybe many, of one kind."""
    return all(_kind_of(kind) is _CONSTANT for kind in set(map(type, value)))


def replaced(value: Any, replace: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A copy in which ``replace`` was asked for everything that has no parts; what does not change is not copied."""
    found = list(parts(value))
    if not found:
        return replace(path, value)
    items = {step: replaced(item, replace, (*path, step)) for step, item in found}
    if all(items[step] is item for step, item in found):
        return value
    if isinstance(value, tuple):
        return type(value)(*items.values()) if hasattr(value, "_fields") else type(value)(items.values())
    result = copy.copy(value)
    for (function, key), item in items.items():
        if function is getattr:
            object.__setattr__(result, key, item)  # dataclasses may be frozen
        else:
            result[key] = item
    return result


def is_constant(value: Any) -> bool:
    return isinstance(value, CONSTANTS)


class Contents:
    """Which objects something holds, and how often tensors in it were written to, at the time it is made.

    Of opaque objects it knows the tensors they have by then; others may come.
    """

    def __init__(self, value: Any, depth: int) -> None:
        self._depth = depth
        self._parts: list[tuple[Path, Any]] = []
        self._tensors: dict[tuple[Path, str], tuple[torch.Tensor, int, torch.Tensor | None]] = {}
        for path, part in everything_in(value, depth):
            self._parts.append((path, part))
            tensors = {"": part} if isinstance(part, torch.Tensor) else _hidden(part)
            for name, tensor in tensors.items():
                self._tensors[path, name] = tensor, version_of(tensor), copy_of_part(tensor)

    def has_changed(self, value: Any) -> bool:
        now = Contents(value, self._depth)
        if len(self._parts) != len(now._parts):
            return True
        if any(
            path != path_now or part is not part_now
            for (path, part), (path_now, part_now) in zip(self._parts, now._parts, strict=True)
        ):
            return True
        return any(
            place not in now._tensors or now._tensors[place][0] is not tensor or is_written(tensor, version, copied)
            for place, (tensor, version, copied) in self._tensors.items()
        )


def _hidden(value: Any) -> dict[str, torch.Tensor]:
    attributes = getattr(value, "__dict__", {}) if _is_opaque(value) else {}
    return {name: item for name, item in attributes.items() if isinstance(item, torch.Tensor)}


def _is_opaque(value: Any) -> bool:
    return _is_of_libraries(type(value))


def _is_of_libraries(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _OPAQUE_SOURCES
