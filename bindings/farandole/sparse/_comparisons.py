"""In which forwards the values of inputs are compared with those that went ahead."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from farandole._C import are_items, write_counts
from farandole.sparse._batch_paths import types_in
from farandole.sparse._input_equality import version_of
from farandole.sparse._sharded import wrapped_name

_EVERY = 16
_DEPTH, _PARTS = 3, 256  # of a batch; of a setting as many parts
_MOST = 1024  # kinds of forwards that are remembered
_BY_VALUE = frozenset([bool, int, float, str, type(None)])
# Settings by module, names of tensors, their identities and counts, names of settings that have parts, and these.
_Seen = tuple[tuple[Any, ...], list[str], tuple[Any, ...], list[str], list[tuple[Any, ...]]]
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"}


class Comparisons:
    """In the first one of each kind, since fx takes what a forward asks for settled once, and in every 16th.

    Of one kind are forwards with equal settings of batches whose parts have the same types. Settings are the attributes
    of the modules that fx went through: bools, numbers, strings and None by value, others by identity and by what they
    have in themselves, as a config or a dict has, and tensors also by how often they were written to; and hooks that are
    given what these modules, or sharded ones, are.

    Args:
        sharded: names of the modules whose inputs are compared.
        read: names of the model's attributes that these are computed with.
    """

    def __init__(self, model: nn.Module, sharded: Sequence[str], read: Iterable[str]) -> None:
        self._model = model
        self._read = {name: operator.attrgetter(name) for name in read}
        above = {""}
        for name in sharded:
            path = name.split(".")
            above |= {".".join(path[:length]) for length in range(1, len(path))}
        traced = {name: model.get_submodule(name) for name in sorted(above)}
        self._hooked = [*traced.values(), *map(model.get_submodule, sharded)]
        self._attributes = [
            _Attributes(name, module) for name, module in traced.items() if wrapped_name(module) is None
        ]
        self._settings: tuple[Any, ...] = ()
        self._tensors: list[torch.Tensor | None] = []
        self._wholes: list[Any] = []
        self._names: tuple[list[str], list[str]] = [], []  # of these two
        self._now: _Seen | None = None
        self._good: _Seen | None = None  # in a forward that has gone well
        self._known: set[int] = set()
        self._kind = 0
        self._since = 0

    def begin(self, batch: Any) -> bool:
        """Whether the forward of this batch is one."""
        if any([attributes.have_changed() for attributes in self._attributes]):  # of all of them
            self._settings = tuple([attributes.settings for attributes in self._attributes])
            self._tensors = [tensor for attributes in self._attributes for tensor in attributes.tensors]
            self._wholes = [whole for attributes in self._attributes for whole in attributes.wholes]
            self._names = (
                [name for attributes in self._attributes for name in attributes.tensor_names],
                [name for attributes in self._attributes for name in attributes.whole_names],
            )
        tensors = self._tensors
        names, whole_names = self._names
        if self._read:
            read = {name: value for name, get in self._read.items() if _is_tensor(value := get(self._model))}
            tensors, names = [*read.values(), *tensors], [*read, *names]
        held = [tuple(map(_identity, _parts(whole))) for whole in self._wholes]
        hooks: list[int] = []
        for module in self._hooked:
            if module._forward_pre_hooks:
                hooks += map(id, module._forward_pre_hooks.values())
        versions = (*map(id, tensors), *write_counts(tensors)) if tensors else ()
        self._now = self._settings, names, versions, whole_names, held
        types = types_in(batch, _DEPTH, _PARTS)
        self._kind = hash((self._settings, versions, tuple(held), tuple(hooks), tuple(types)))
        return self._kind not in self._known or self._since >= _EVERY - 1

    def end(self, has_compared: bool) -> None:
        """That forward has gone well."""
        self._good = self._now
        self._since = 0 if has_compared else self._since + 1
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known.add(self._kind)

    def changed(self) -> list[str]:
        """Names of the settings that are others in this forward than in the last one that has gone well."""
        if self._now is None or self._good is None:
            return []
        now, before = _by_name(self._now), _by_name(self._good)
        return [name for name in {**before, **now} if name not in now or before.get(name) != now[name]]

    def forget(self) -> None:
        """The model has changed."""
        self._known.clear()


class _Attributes:
    """Those of a module; looked for anew where others have come, or one has become another."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._prefix = f"{name}." if name else ""
        self._held = vars(module)
        self._names: list[str] = []
        self._values: list[Any] = []
        self.settings: tuple[tuple[str, Any], ...] = ()
        self.wholes: list[Any] = []  # settings that have parts
        self.tensors: list[torch.Tensor | None] = []
        self.whole_names: list[str] = []
        self.tensor_names: list[str] = []

    def have_changed(self) -> bool:
        """Whether the settings are others, or the tensors."""
        if are_items(self._held, self._names, self._values):
            return False
        self._names, self._values = [*self._held], [*self._held.values()]
        named = {f"{self._prefix}{name}": value for name, value in zip(self._names, self._values, strict=True)}
        tensors = {name: value for name, value in named.items() if _is_tensor(value)}
        settings = {
            name: value
            for name, value in named.items()
            if name not in tensors and name[len(self._prefix) :] not in _OF_ALL_MODULES
        }
        wholes = {
            name: value for name, value in settings.items() if isinstance(value, (dict, list)) or _has_names(value)
        }
        self.tensors, self.tensor_names = [*tensors.values()], [*tensors]
        self.wholes, self.whole_names = [*wholes.values()], [*wholes]
        self.settings = tuple([(name, _identity(value)) for name, value in settings.items()])
        return True


def _by_name(seen: _Seen) -> dict[str, Any]:
    settings, names, versions, whole_names, held = seen
    found: dict[str, Any] = {name: [identity] for of_module in settings for name, identity in of_module}
    for name, identities in zip(whole_names, held, strict=True):
        found[name].append(identities)
    return found | dict(zip(names, zip(versions, versions[len(names) :], strict=False), strict=True))


def _parts(whole: Any) -> list[Any]:
    """At once, since another thread may add to it."""
    held = whole if isinstance(whole, (dict, list)) else vars(whole)
    return [*islice(held.values() if isinstance(held, dict) else held, _PARTS)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _has_names(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor, nn.Module)) and not callable(value)


def _identity(value: Any) -> Any:
    if type(value) in _BY_VALUE:
        return value
    return (id(value), version_of(value)) if isinstance(value, torch.Tensor) else id(value)
