"""The inputs of sharded modules as parts of a batch, seen in one forward, for models that torch.fx cannot trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from farandole.sparse._batch_paths import Contents, Path, everything_in, follow, is_constant, path_name, replaced
from farandole.sparse._sharded import is_object_pool, sharded_modules
from farandole.sparse._verdict import (
    NEVER_CALLED,
    OBJECT_POOL,
    WHOLE_MODEL,
    Inputs,
    Refusal,
    Verdict,
    called_again,
    no_inputs,
    refused,
)

__all__ = ["RecordedInputs", "record_inputs"]

_DEPTH = 6
_IN_THE_BATCH = "Compute it where the batch is made, and let the batch hold it"
_Call = tuple[tuple[Any, ...], dict[str, Any]]


class RecordedInputs:
    """Takes (args, kwargs) of sharded modules out of a batch, from where one forward had them. As an InputGraph.

    Batches have to be alike: which of its parts a forward hands on must not depend on the batch.
    """

    post_processing: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    read_elsewhere: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.verdicts: tuple[Verdict, ...] = ()
        self._templates: list[_Call] = []

    def __call__(self, batch: Any) -> Inputs:
        return [replaced(template, lambda _, part: _taken(part, batch)) for template in self._templates]

    def run(self, batch: Any) -> tuple[Inputs, list[Any]]:
        """The inputs, which are parts of the batch, computed from none."""
        return self(batch), []

    def only(self, names: Sequence[str]) -> RecordedInputs:
        """Those of these modules, in this order."""
        templates = dict(zip(self.names, self._templates, strict=True))
        self.names, self._templates = tuple(names), [templates[name] for name in names]
        return self

    def _settle(self, sharded: dict[str, nn.Module], seen: dict[str, list[_Call | Refusal]]) -> None:
        found: dict[str, _Call] = {}  # in call order
        refusals = {name: OBJECT_POOL for name, module in sharded.items() if is_object_pool(module)}
        for name, calls in seen.items():
            call = calls[0]
            if name in refusals:
                continue
            if len(calls) > 1:
                refusals[name] = called_again([], len(calls))
            elif isinstance(call, Refusal):
                refusals[name] = call
            else:
                found[name] = call
        self.names = tuple(found)
        self._templates = list(found.values())
        self.verdicts = tuple(
            Verdict(name, True) if name in found else refused(name, refusals.get(name, NEVER_CALLED))
            for name in sharded
        )


@contextlib.contextmanager
def record_inputs(model: nn.Module, is_sharded: Callable[[nn.Module], bool], batch: Any) -> Iterator[RecordedInputs]:
    """Inside, the caller runs the model's forward once, on this very batch; behind it what is yielded is complete.

    An argument is found if it is the batch or an object in it, in one place only, up to 6 attributes or items deep,
    or a list, tuple or dict of such. None, numbers and strings are taken for constants, unless the batch has an equal
    one. Nothing that forward computes or changes is found.
    """
    recorded = RecordedInputs()
    if is_sharded(model):
        recorded.verdicts = (refused("", WHOLE_MODEL),)
        yield recorded
        return
    parts = _Parts(batch)
    seen: dict[str, list[_Call | Refusal]] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.setdefault(name, []).append(parts.template_of(args, kwargs))

        return note

    sharded = sharded_modules(model, is_sharded)
    with contextlib.ExitStack() as hooks:
        for name, module in sharded.items():
            handle = module.register_forward_pre_hook(noting(name), prepend=True, with_kwargs=True)
            hooks.callback(handle.remove)
        yield recorded
    recorded._settle(sharded, seen)


class _Part:
    """Stands in a template for what a batch has there."""

    __slots__ = ("path", "type_")

    def __init__(self, path: Path, type_: type) -> None:
        self.path = path
        self.type_ = type_


def _taken(part: Any, batch: Any) -> Any:
    if not isinstance(part, _Part):
        return part
    found = follow(batch, part.path)
    if not isinstance(found, part.type_):
        raise TypeError(
            f"{path_name(part.path)} is {type(found).__name__} in this batch, and was {part.type_.__name__} in that"
            " from which inputs of sharded modules were recorded"
        )
    return found


class _Absent(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class _Parts:
    """What a batch was before forward. Holds all of it, so that no other object can get the id of one."""

    def __init__(self, batch: Any) -> None:
        self._paths: dict[int, list[Path]] = {}
        self._before: dict[int, Contents] = {}
        self._constants: dict[tuple[type, Any], Path] = {}
        self._all = [value for _, value in everything_in(batch, _DEPTH)]
        for path, value in everything_in(batch, _DEPTH):
            if is_constant(value):
                if not any(function is getattr and key.startswith("_") for function, key in path):
                    self._constants.setdefault((type(value), value), path)
            elif not (isinstance(value, tuple) and not value):  # of the empty tuple there is only one
                self._paths.setdefault(id(value), []).append(path)
                self._before[id(value)] = Contents(value, _DEPTH)

    def template_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | Refusal:
        if not args and not kwargs:
            return no_inputs(None)
        try:
            return (
                tuple(self._found(value, str(index)) for index, value in enumerate(args)),
                {name: self._found(value, name) for name, value in kwargs.items()},
            )
        except _Absent as absent:
            return absent.refusal

    def _found(self, value: Any, where: str) -> Any:
        if is_constant(value):
            return self._constant(value, where)
        if id(value) in self._paths:
            return self._part(value, where)
        if isinstance(value, dict):
            return {key: self._found(item, f"{where}[{key!r}]") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self._found(item, f"{where}[{index}]") for index, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        raise _Absent(Refusal(None, f"its input {where} is no part of the batch: computed in forward", _IN_THE_BATCH))

    def _constant(self, value: Any, where: str) -> Any:
        path = self._constants.get((type(value), value))
        if path is None:
            return value
        reason = f"its input {where} is {value!r}, which may come from {path_name(path)} or be a constant"
        raise _Absent(Refusal(None, reason, "Leave constants to the module, and pass what varies as tensors"))

    def _part(self, value: Any, where: str) -> _Part:
        paths = self._paths[id(value)]
        if len(paths) > 1:
            places = " and ".join(map(path_name, paths))
            reason = f"its input {where} is in two places of the batch: {places}"
            raise _Absent(Refusal(None, reason, "Let the batch hold it once"))
        if self._before[id(value)].has_changed(value):
            reason = f"its input {where}, {path_name(paths[0])}, is changed in forward, in place"
            raise _Absent(Refusal(None, reason, _IN_THE_BATCH))
        return _Part(paths[0], type(value))
