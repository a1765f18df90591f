"""Tensors of a model that lie in the same memory: what is written to one of them is written to the other one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, tuple, set, dict)
_TORCHS = frozenset(vars(nn.Module()))  # attributes that every module has


@dataclass(frozen=True)
class Place:
    """Where a tensor is: in a module that forward calls, or, without one, in the model."""

    module: str | None
    name: str
    is_trained: bool
    is_frozen: bool  # a parameter that nobody trains, which is taken to stay as it is


class SharedMemory:
    """
    Args:
        modules: that forward calls, by name.
        attributes: of the model that forward reads, by name.
        model: the parameters that are trained are its own.
    """

    def __init__(self, modules: Mapping[str, nn.Module], attributes: Mapping[str, Any], model: nn.Module) -> None:
        self._places: dict[int, list[Place]] = {}
        for module, held in modules.items():
            for name, tensor in tensors_of(held):
                self._add(module, name, tensor)
        for name, value in attributes.items():
            self._add(None, name, value)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._add(None, name, parameter)
        self._names = {name: memory_of(value) for name, value in attributes.items()}
        self._first = {memory: name for name, memory in reversed(self._names.items()) if memory != 0}

    def name_of(self, attribute: str) -> str:
        """The same for attributes that share memory."""
        return self._first.get(self._names.get(attribute, 0), attribute)

    def others_of_module(self, module: str, held: nn.Module) -> tuple[str, Place] | None:
        """A tensor of it, and what else may be written to, or written with it."""
        for name, tensor in tensors_of(held):
            place = self._other(tensor, (place for place in self._at(tensor) if place.module != module))
            if place is not None:
                return name, place
        return None

    def others_of_attribute(self, tensor: torch.Tensor) -> Place | None:
        """A tensor of a module, or a parameter that is trained, which may be written to."""
        return self._other(tensor, (p for p in self._at(tensor) if p.module is not None or p.is_trained))

    def _add(self, module: str | None, name: str, tensor: Any) -> None:
        memory = memory_of(tensor)
        if memory != 0:
            is_parameter = isinstance(tensor, nn.Parameter)
            place = Place(module, name, tensor.requires_grad, is_parameter and not tensor.requires_grad)
            self._places.setdefault(memory, []).append(place)

    def _at(self, tensor: torch.Tensor) -> list[Place]:
        return self._places.get(memory_of(tensor), [])

    def _other(self, tensor: torch.Tensor, places: Iterable[Place]) -> Place | None:
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return next((place for place in places if not (is_frozen and place.is_frozen)), None)


def memory_of(tensor: Any) -> int:
    """The same for tensors that share memory; 0 for none, and for what has none of its own."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse ones, or such as wrap others
        return 0


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What its attributes hold, or containers among them; also those of modules that it has not registered."""
    todo: list[tuple[str, nn.Module]] = [("", module)]
    seen: set[int] = set()
    while todo:
        prefix, part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name, value in _held_by(part):
            if isinstance(value, torch.Tensor):
                yield prefix + name, value
            elif isinstance(value, nn.Module):
                todo.append((f"{prefix}{name}.", value))


def _held_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    own = {name: value for name, value in vars(module).items() if name not in _TORCHS}
    for name, value in {**own, **module._parameters, **module._buffers, **module._modules}.items():
        yield name, value
        if isinstance(value, _CONTAINERS):
            for part in [*(value.values() if isinstance(value, dict) else value)]:
                yield name, part
