"""What a model's forward leaves behind in its modules."""

from __future__ import annotations

import copy
import functools
import operator
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from farandole._C import are_contents
from farandole.sparse._scripted import scripted_attributes

_BY_NAME = ("_parameters", "_buffers", "_modules")  # whose items are attributes of the module
_SCRIPTED = "(scripted)"  # no attribute's name
_ABSENT = object()


class ModelState:
    """The attributes of all modules of a model, and the items of dicts, lists, sets and deques among them, when it is
    made.

    Args:
        besides: names of attributes that are none of it.
        looks_into_objects: whether the attributes of objects among them, as a config, are items as well.
    """

    def __init__(self, model: nn.Module, besides: tuple[str, ...] = (), looks_into_objects: bool = False) -> None:
        self._model = model
        self._options = besides, looks_into_objects
        self._modules = [_Attributes(name, module, *self._options) for name, module in model.named_modules()]
        self._tensors: dict[str, torch.Tensor] | None = None
        self._is_seen = all(module.is_seen for module in self._modules)
        self._contents = [each for module in self._modules for each in module.contents()] if self._is_seen else []

    def as_now(self) -> ModelState:
        """Itself, where nothing has changed since."""
        return self if self._is_seen and not self.has_changed() else ModelState(self._model, *self._options)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        if self._tensors is None:
            self._tensors = {name: tensor for module in self._modules for name, tensor in module.tensors()}
        return self._tensors

    def has_changed(self) -> bool:
        """Since it was made."""
        if self._contents and are_contents(self._contents):
            return False
        return any(module.have_changed() for module in self._modules)

    def differs(self, other: ModelState) -> bool:
        """From what the same model was when the other one was made."""
        if self is other:
            return False
        return len(self._modules) != len(other._modules) or any(
            one.differ(before) for before, one in zip(other._modules, self._modules, strict=True)
        )

    def restore_but_for(self, later: ModelState) -> None:
        """Makes all be as it was, but for what has become something else since ``later`` was made."""
        if self is later:
            return
        for module, then in zip(self._modules, later._modules, strict=False):
            module.restore_but_for(then)

    def restore(self) -> dict[str, Any]:
        """Makes all be as it was, where it was made of all attributes. Returns what it had become, by name; None for what
        was gone."""
        changed: dict[str, Any] = {}
        for module in self._modules:
            changed |= module.restore()
        return changed


class _Attributes:
    """Those of a module. They are taken, or looked at, for each batch."""

    def __init__(self, name: str, module: nn.Module, besides: tuple[str, ...], looks_into_objects: bool) -> None:
        self._prefix, self._besides = f"{name}." if name else "", besides
        self._looks_into_objects = looks_into_objects
        self._module = module
        self._scripted = scripted_attributes(module)
        self._now = vars(module)
        self._before = self._now.copy()
        self._items: dict[str, Any] = {}  # of containers, as they are now
        self._containers: list[tuple[Any, Any]] = []  # with items, and these
        self._empty: list[Any] = []
        for key in (*self._before, _SCRIPTED):
            container = self._container(key)
            if container is None:
                continue
            items = self._items[key] = {**container} if isinstance(container, dict) else [*container]
            if items:
                self._containers.append((container, items))
            else:
                self._empty.append(container)

    @property
    def is_seen(self) -> bool:
        """Not a scripted one, whose attributes are elsewhere."""
        return "_buffers" in self._items

    def contents(self) -> Iterator[tuple[Any, list[Any] | None, list[Any]]]:
        """The attributes and all containers, with what they hold."""
        yield self._now, [*self._before], [*self._before.values()]
        for container, items in (*self._containers, *((empty, ()) for empty in self._empty)):
            is_dict = isinstance(container, dict)
            yield container, [*items] if is_dict else None, [*(items.values() if is_dict and items else items)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        by_name = (self._items.get(name) or {**getattr(self._module, name)} for name in ("_buffers", "_parameters"))
        for held in (self._before, self._items.get(_SCRIPTED, {}), *by_name):
            for key, value in held.items():
                if isinstance(value, torch.Tensor):
                    yield self._prefix + key, value

    def _container(self, key: str) -> Any:
        """None: what has this name is none."""
        if key == _SCRIPTED:
            return self._scripted
        value = self._before[key]
        kind: Any = type(value)
        if _is_container(kind):
            return value
        return vars(value) if self._looks_into_objects and _has_settings(kind) else None

    def have_changed(self) -> bool:
        self._look()
        now, before = self._now, self._before
        is_same = len(before) == len(now) and all(map(operator.is_, before.values(), now.values()))
        if not (is_same and [*before] == [*now]) and self._differences(now):
            return True
        return any(self._empty) or not all(_are_items(items, container) for container, items in self._containers)

    def differ(self, other: _Attributes) -> bool:
        return bool(self._differences(other._before)) or any(
            not _are_items(items, other._items.get(key, ())) for key, items in self._items.items()
        )

    def restore_but_for(self, then: _Attributes) -> None:
        self._look()
        _restore_items(self._now, self._before, then._before, self._besides)
        for key, items in self._items.items():
            container = self._container(key)
            if then._before.get(key) is not self._before.get(key):
                if container is self._before[key]:  # nobody else changes what the module had let go of by then
                    _refill(container, items)
            elif isinstance(container, dict) and key in then._items:
                _restore_items(container, items, then._items[key])
            elif key in then._items and _are_items(then._items[key], container):
                _refill(container, items)
        self._put()

    def restore(self) -> dict[str, Any]:
        self._look()
        changed = {self._prefix + key: self._now.get(key) for key in self._differences(self._now)}
        self._now.clear()
        self._now.update(self._before)
        for key, items in self._items.items():
            container = self._container(key)
            if key in _BY_NAME:
                changed |= {self._prefix + item: container.get(item) for item in _differences(items, container)}
            elif not _are_items(items, container):
                changed[self._prefix + key] = copy.copy(container)
            _refill(container, items)
        self._put()
        return changed

    def _look(self) -> None:
        if self._scripted is not None:
            self._scripted.look()

    def _put(self) -> None:
        if self._scripted is not None:
            self._scripted.put()

    def _differences(self, now: dict[str, Any]) -> list[str]:
        return [key for key in _differences(self._before, now) if key not in self._besides]


@functools.lru_cache(maxsize=1024)
def _is_container(kind: type) -> bool:
    return issubclass(kind, (dict, list, set, deque))


@functools.lru_cache(maxsize=1024)
def _has_settings(kind: type) -> bool:
    """Whether what is of this class is known by its attributes, as a config is."""
    is_known = kind.__module__.partition(".")[0] in ("builtins", "torch", "torchrec", "fbgemm_gpu")
    is_called = any("__call__" in vars(base) for base in kind.__mro__)
    return not (is_known or is_called or kind.__dictoffset__ == 0 or issubclass(kind, (type, nn.Module, torch.Tensor)))


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [key for key in {**before, **now} if before.get(key, _ABSENT) is not now.get(key, _ABSENT)]


def _restore_items(
    now: dict[str, Any], before: dict[str, Any], then: dict[str, Any], besides: tuple[str, ...] = ()
) -> None:
    """But for those that are not what they were ``then``."""
    for key in _differences(before, then):
        if key in besides or now.get(key, _ABSENT) is not then.get(key, _ABSENT):
            continue
        if key in before:
            now[key] = before[key]
        else:
            now.pop(key, None)


def _are_items(items: Any, container: Any) -> bool:
    """The same objects in the same order, and by the same keys; sets have an order of their own each."""
    if len(items) != len(container):
        return False
    if isinstance(container, dict):
        return all(map(operator.is_, items, container)) and all(map(operator.is_, items.values(), container.values()))
    return all(map(operator.is_, items, container))


def _refill(container: Any, items: Any) -> None:
    if _are_items(items, container):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    else:
        container.update(items)
