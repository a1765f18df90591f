"""Modules that ran ahead of a model's forward, and are not to run in it again."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from farandole.sparse._batch_paths import Path, Step, tensors_in
from farandole.sparse._input_equality import is_alike, is_equal_input, version_of
from farandole.sparse._input_writes import InputWrites, is_by_value
from farandole.sparse._untraced import UntracedForward


class Noted(dict[str, list[Any]]):
    """What modules have returned in a run, by name and in call order; and what they were given, as it is behind it."""

    __slots__ = ("given",)

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__((name, []) for name in names)
        self.given: dict[str, list[_Given]] = {name: [] for name in self}

    def tensors(self) -> list[torch.Tensor]:
        """What the modules were given, and copies of it."""
        return [tensor for calls in self.given.values() for given in calls for tensor in given.tensors()]


class PostProcessing:
    """Lets modules return in a forward what they returned when ``InputGraph.run`` called them for that batch.

    It replaces their ``forward`` until it is closed. Only the context (so, the thread) that is in ``replaying`` gets
    kept results; all others call the modules as ever, at the same time. Hooks of the modules run both times, around
    what is kept.

    Args:
        names: of the modules.
        read_elsewhere: those among them that must not write to what they are given.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], read_elsewhere: frozenset[str] = frozenset()) -> None:
        self._read_elsewhere = read_elsewhere
        self._kept: ContextVar[dict[str, deque[tuple[Any, _Given]]] | None] = ContextVar("kept", default=None)
        self._noted: ContextVar[Noted | None] = ContextVar("noted", default=None)
        self._is_same = is_equal_input
        self._runs = 0
        self._calls_made = 0
        self._undo = contextlib.ExitStack()
        self.forwards: dict[str, Callable[..., Any]] = {}  # those of the modules now, by name
        for name in names:
            module = model.get_submodule(name)
            before, original = vars(module).get("forward"), module.forward
            forward = UntracedForward(self._replaying_forward(name, original), original)
            # Not by setattr, which torch.jit's traced modules pass on to another module.
            vars(module)["forward"] = self.forwards[name] = forward
            self._undo.callback(_restore, module, before)

    @contextlib.contextmanager
    def noting(self) -> Iterator[Noted]:
        """Inside, one run ahead of a batch; yields what the modules return in it."""
        noted = Noted(self.forwards)
        token = self._noted.set(noted)
        try:
            yield noted
        finally:
            self._noted.reset(token)
        by_value = is_by_value(self._runs)
        self._runs += 1
        for calls in noted.given.values():
            for given in calls:  # the modules may have written to it, which they do not a second time
                given.note(by_value)

    @contextlib.contextmanager
    def replaying(self, results: Noted, compares: bool = True) -> Iterator[None]:
        """Inside, one forward of the batch whose results these are.

        Args:
            compares: the values too of what the modules are given.

        Raises:
            RuntimeError: forward called one of the modules more often or more rarely than when it was traced, or gave it
                something else.
        """
        self._is_same = is_equal_input if compares else is_alike
        kept = {name: deque(zip(outputs, results.given[name], strict=True)) for name, outputs in results.items()}
        token = self._kept.set(kept)
        try:
            yield
        finally:
            self._kept.reset(token)
        left = [name for name, outputs in kept.items() if outputs]
        if left:
            raise RuntimeError(f"forward called {', '.join(map(repr, left))} more rarely than when it was traced")

    def calls_made(self) -> int:
        """How often the modules have run so far. One more from when it is closed, since nobody counts then."""
        return self._calls_made

    def close(self) -> None:
        self._calls_made += 1
        self._undo.close()

    def _replaying_forward(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(name, original, *args, **kwargs)

        return forward

    def _forward(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kept = self._kept.get()
        if kept is None or name not in kept:
            noted = self._noted.get()
            self._calls_made += 1
            return original(*args, **kwargs) if noted is None else self._run(noted, name, original, args, kwargs)
        if not kept[name]:
            raise RuntimeError(f"forward called {name!r} more often than when it was traced")
        result, given = kept[name].popleft()
        is_same = is_alike if given.is_written else self._is_same
        if not given.is_as_noted() or not is_same(given.call, (args, kwargs)):
            raise RuntimeError(
                f"{name} has run ahead of forward, and is called there with something else, or with tensors that were "
                "written to since: expected a forward that treats all batches alike, and modules before it that neither "
                "write in place to what it is given, nor replace parts of that, but for modules without parameters whose "
                "results it is given. Let what does so run behind the sharded modules, or on copies"
            )
        return result

    def _run(self, noted: Noted, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = _Given(args, kwargs)
        given.note()
        result = original(*args, **kwargs)
        given.is_written = not given.is_as_noted()
        if given.is_written and name in self._read_elsewhere:
            raise RuntimeError(
                f"{name}, which runs ahead of forward, writes in place to what it is given, or replaces parts of that, and "
                "forward reads it elsewhere: expected a module that leaves it as it is, and returns a copy"
            )
        noted[name].append(result)
        noted.given[name].append(given)
        return result


class _Given:
    """What a module was called with, and whether that has written to it."""

    is_written = False

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call = args, kwargs
        self._noted: list[tuple[Path, Step | None, torch.Tensor, int]] = []
        self._values: InputWrites | None = None

    def note(self, by_value: bool = False) -> None:
        self._noted = [(*place, version_of(place[2])) for place in tensors_in(self.call)]
        self._values = InputWrites(self._as_noted(), by_value) if by_value else None

    def is_as_noted(self) -> bool:
        """Tensors that have come since are of those that features make when they are asked for."""
        is_written = not self._are_noted(tensors_in(self.call))
        return not is_written and (self._values is None or not self._values.found_any())

    def _are_noted(self, found: list[tuple[Path, Step | None, torch.Tensor]]) -> bool:
        if len(found) == len(self._noted) and all(
            tensor is before and version_of(tensor) == version and path == path_before and step == step_before
            for (path, step, tensor), (path_before, step_before, before, version) in zip(
                found, self._noted, strict=True
            )
        ):
            return True
        now = {(path, step): tensor for path, step, tensor in found}
        return all(
            now.get((path, step)) is tensor and version_of(tensor) == version
            for path, step, tensor, version in self._noted
        )

    def tensors(self) -> list[torch.Tensor]:
        """All that ``is_as_noted()`` reads, and what it was called with."""
        copies = () if self._values is None else self._values.copies
        return [*self._as_noted(), *(copy for copy in copies if copy is not None)]

    def _as_noted(self) -> list[torch.Tensor]:
        return [tensor for _, _, tensor, _ in self._noted]


def _restore(module: nn.Module, before: Any) -> None:
    if before is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = before
