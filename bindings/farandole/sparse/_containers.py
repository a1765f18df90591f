"""Copies of containers and dataclasses that keep their types and attributes, whatever their constructors are."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Sequence
from typing import Any


def attributes_of(value: Any) -> dict[str, Any]:
    """None of a dict whose attributes are its items, or that asks its items for them."""
    attributes: dict[str, Any] = value.__dict__ if type(value).__dictoffset__ else {}
    return {} if attributes is value else attributes


def shallow_copy(value: Any) -> Any:
    """Of a list, a dict or a dataclass, of any subclass."""
    try:
        result = copy.copy(value)
    except (LookupError, AttributeError):  # a __getattr__ that is __getitem__; frozen, with slots
        result = _copied_by_parts(value)
    if type(value).__dictoffset__ and value.__dict__ is value:
        result.__dict__ = result
    return result


def _copied_by_parts(value: Any) -> Any:
    original: Any = type(value)
    result = original.__new__(original)
    if isinstance(value, dict):
        dict.update(result, value)
    for kind in original.__mro__:
        for slot in vars(kind).values():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    slot.__set__(result, slot.__get__(value))
    if attributes_of(value):
        result.__dict__.update(value.__dict__)
    return result


def tuple_like(value: tuple[Any, ...], parts: Sequence[Any]) -> Any:
    """Namedtuples too."""
    kind: Any = type(value)
    if kind is tuple:
        return tuple(parts)
    try:
        result = tuple.__new__(kind, parts)
    except TypeError:  # of C: torch.return_types
        return kind(parts)
    if attributes_of(value):
        result.__dict__.update(value.__dict__)
    return result
