"""What a model's forward leaves behind in its modules."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from torch import nn

_BY_NAME = ("_parameters", "_buffers", "_modules")  # whose items are attributes of the module
_CONTAINERS = (dict, list, set, deque)
_ABSENT = object()


class ModelState:
    """The attributes of all modules of a model, and the items of dicts, lists, sets and deques among them, when it is
    made.

    Args:
        besides: names of attributes that are none of it.
    """

    def __init__(self, model: nn.Module, besides: tuple[str, ...] = ()) -> None:
        self._besides = besides
        self._modules = [
            (name, vars(module), self._attributes(vars(module)), _containers(vars(module)))
            for name, module in model.named_modules()
        ]

    def has_changed(self) -> bool:
        """Since it was made."""
        return any(
            _differences(before, self._attributes(now))
            or any(_identities(items) != _identities(before[key]) for key, items in containers.items())
            for _, now, before, containers in self._modules
        )

    def differs(self, other: ModelState) -> bool:
        """From what the same model was when the other one was made."""
        return len(self._modules) != len(other._modules) or any(
            _differences(before, attributes)
            or any(_identities(items) != _identities(containers.get(key, ())) for key, items in contents.items())
            for (_, _, before, containers), (_, _, attributes, contents) in zip(
                other._modules, self._modules, strict=True
            )
        )

    def restore_but_for(self, later: ModelState) -> None:
        """Makes all be as it was, but for what has become something else since ``later`` was made."""
        for (_, now, before, containers), (_, _, then, contents) in zip(self._modules, later._modules, strict=False):
            _restore_items(now, before, then)
            for key, items in containers.items():
                container = before[key]
                if isinstance(container, dict) and key in contents:
                    _restore_items(container, items, contents[key])
                elif key in contents and _identities(contents[key]) == _identities(container):
                    _refill(container, items)

    def restore(self) -> dict[str, Any]:
        """Makes all be as it was, where it was made of all attributes. Returns what it had become, by name; None for what
        was gone."""
        changed: dict[str, Any] = {}
        for name, now, before, containers in self._modules:
            prefix = f"{name}." if name else ""
            for key in _differences(before, self._attributes(now)):
                changed[prefix + key] = now.get(key)
            now.clear()
            now.update(before)
            for key, items in containers.items():
                container = before[key]
                if key in _BY_NAME:
                    changed |= {prefix + item: container.get(item) for item in _differences(items, container)}
                elif _identities(items) != _identities(container):
                    changed[prefix + key] = copy.copy(container)
                _refill(container, items)
        return changed

    def _attributes(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in attributes.items() if key not in self._besides}


def _containers(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.copy(value) for key, value in attributes.items() if isinstance(value, _CONTAINERS)}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [key for key in {**before, **now} if before.get(key, _ABSENT) is not now.get(key, _ABSENT)]


def _restore_items(now: dict[str, Any], before: dict[str, Any], then: dict[str, Any]) -> None:
    """But for those that are not what they were ``then``."""
    for key in _differences(before, then):
        if now.get(key, _ABSENT) is not then.get(key, _ABSENT):
            continue
        if key in before:
            now[key] = before[key]
        else:
            now.pop(key, None)


def _identities(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(item) for item in container]


def _refill(container: Any, items: Any) -> None:
    if _identities(container) == _identities(items):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    else:
        container.update(items)
