"""What torch.jit's modules hold in C++, where no ``vars()`` looks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class ScriptedAttributes(dict[str, Any]):
    """The attributes of a scripted module that are neither parameters nor buffers: tensors, numbers, strings, and
    containers of these. An item is the same object for as long as the attribute is equal to it, a tensor the very one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = weakref.ref(module)

    def look(self) -> None:
        """Takes the attributes as they are now."""
        for name, value in self._found():
            if name not in self or not _is_equal(self[name], value):
                self[name] = value

    def put(self) -> None:
        """Gives the module what the items have become."""
        for name, value in self._found():
            if name in self and not _is_equal(self[name], value):
                setattr(self._module(), name, self[name])

    def _found(self) -> Iterator[tuple[str, Any]]:
        module: Any = self._module()
        besides = ("training", *module._parameters.keys(), *module._buffers.keys())
        for name in module._concrete_type.get_attributes():
            if name not in besides and _is_known(value := getattr(module, name)):
                yield name, value


_attributes: weakref.WeakKeyDictionary[nn.Module, ScriptedAttributes] = weakref.WeakKeyDictionary()


def scripted_attributes(module: nn.Module) -> ScriptedAttributes | None:
    """None of a module that is not torch.jit's."""
    if not isinstance(module, torch.jit.ScriptModule) or not hasattr(module, "_concrete_type"):
        return None
    getattr(module, "forward", None)  # which is in its vars() from the first time that somebody asks for it
    if module not in _attributes:
        _attributes[module] = ScriptedAttributes(module)
    attributes = _attributes[module]
    attributes.look()
    return attributes


def _is_known(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_known, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_is_known, value))
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, complex, str))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return [*one] == [*other] and all(map(_is_equal, one.values(), other.values()))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if one is other or isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
