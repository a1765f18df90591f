"""Whether a model is still the one that was attached: its sharded modules, and what their inputs are made with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from farandole._C import are_families, families
from farandole.sparse._sharded import sharded_modules

_AGAIN = "detach() the pipeline before a change and attach() it after"


class ModelChanges:
    """
    Args:
        is_sharded: tells sharded modules.
    """

    def __init__(self, model: nn.Module, is_sharded: Callable[[nn.Module], bool]) -> None:
        self._model = model
        self._is_sharded = is_sharded
        self._sharded = sharded_modules(model, is_sharded)
        self._ids = set(map(id, self._sharded.values()))
        # What torchrec's reshard() makes anew.
        self._shardings = {name: getattr(each, "_embedding_shardings", None) for name, each in self._sharded.items()}
        self._modules = self._open_modules()
        # With their parents, since a child may have gone from one to the next.
        self._families = families(self._modules)
        self.processing: dict[str, nn.Module] = {}  # what runs ahead, as refuse() has last found it
        self._parameters: tuple[str, ...] = ()
        self._processing_parameters: list[object] = []
        self._places: list[tuple[dict[str, object], str]] = []

    def watch(self, processing: Iterable[str], attributes: Iterable[str]) -> None:
        """By name, what runs ahead of forwards: modules, and attributes of the model."""
        self.processing = {name: self._model.get_submodule(name) for name in processing}
        self._note_places()
        self._parameters = tuple(
            name for name in attributes if isinstance(operator.attrgetter(name)(self._model), torch.Tensor)
        )

    def refuse(self, forwards: Mapping[str, Callable[..., object]]) -> bool:
        """Whether other modules have come or gone.

        Args:
            forwards: by name, those that were put into modules.

        Raises:
            RuntimeError: a sharded module has, or what runs ahead of forwards has become another one, or is trained.
        """
        is_shadowed = any([key in held for held, key in self._places])
        is_same = not is_shadowed and are_families(self._modules, self._families)
        for name, forward in forwards.items():
            expected = self.processing[name] if name in self.processing else self._sharded[name]
            if not (is_same or self._found(name) is expected) or expected.__dict__.get("forward") is not forward:
                raise _changed(
                    name, "the module and the forward that were attached, and no pipeline of another model that has it"
                )
        for name, module in self._sharded.items():
            if getattr(module, "_embedding_shardings", None) is not self._shardings[name]:
                raise _changed(name, "the sharding that was attached")
        for name, module in self.processing.items() if any(self._processing_parameters) or not is_same else ():
            trained = [key for key, parameter in module.named_parameters() if parameter.requires_grad]
            if trained:
                raise _changed(name, f"no trainable parameters ({', '.join(trained)}) in what runs ahead of forwards")
        for name in self._parameters:
            if operator.attrgetter(name)(self._model).requires_grad:
                raise _changed(name, "no trainable parameter in what runs ahead of forwards")
        return not is_same and self._has_other_modules()

    def _has_other_modules(self) -> bool:
        now = sharded_modules(self._model, self._is_sharded)
        for name in {**self._sharded, **now}:
            if now.get(name) is not self._sharded.get(name):
                raise _changed(name, "the sharded modules that were attached")
        self._modules = self._open_modules()
        self._families = families(self._modules)
        self._note_places()
        return True

    def _note_places(self) -> None:
        """Where parameters of what runs ahead are, or come; and where an attribute would hide a module."""
        self._places = []
        for name in (*self._sharded, *self.processing):
            parent = self._model
            for key in name.split(".") if name else ():
                self._places.append((vars(parent), key))
                parent = parent.get_submodule(key)
        self._processing_parameters = [
            each._parameters for module in self.processing.values() for each in module.modules()
        ]

    def _open_modules(self) -> list[nn.Module]:
        """All that others may come into: none inside of sharded ones, which make some as they run."""
        found: list[nn.Module] = []
        todo: list[nn.Module | None] = [self._model]
        while todo:
            module = todo.pop()
            if module is not None and id(module) not in self._ids:
                found.append(module)
                todo += module._modules.values()
        return found

    def _found(self, name: str) -> object:
        try:
            return operator.attrgetter(name)(self._model)
        except AttributeError:
            return None


def _changed(name: str, expected: str) -> RuntimeError:
    return RuntimeError(f"{name} has changed under its pipeline: expected {expected}; {_AGAIN}")
