"""Modules that ran ahead of a model's forward, and are not to run in it again."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from farandole.sparse._given_call import GivenCall
from farandole.sparse._input_equality import are_same_arguments, is_alike, is_equal_input
from farandole.sparse._input_writes import is_by_value
from farandole.sparse._untraced import UntracedForward

Kept = dict[str, deque[tuple[Any, GivenCall]]]  # results, and what the modules were given for them


class Noted(dict[str, list[Any]]):
    """What modules have returned in a run, by name and in call order; and what they were given, as it is behind it."""

    __slots__ = ("given",)

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__((name, []) for name in names)
        self.given: dict[str, list[GivenCall]] = {name: [] for name in self}

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
        self.kept: ContextVar[Kept | None] = ContextVar("kept", default=None)
        self.noted: ContextVar[Noted | None] = ContextVar("noted", default=None)
        self._is_same = is_equal_input
        self.runs = 0
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

    def noting(self) -> _Noting:
        """Inside, one run ahead of a batch; gives what the modules return in it."""
        return _Noting(self)

    def replaying(self, results: Noted, compares: bool = True) -> _Replaying:
        """Inside, one forward of the batch whose results these are.

        Args:
            compares: the values too of what the modules are given.

        Raises:
            RuntimeError: forward called one of the modules more often or more rarely than when it was traced, or gave it
                something else.
        """
        self._is_same = is_equal_input if compares else is_alike
        return _Replaying(self.kept, results)

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
        kept = self.kept.get()
        if kept is None or name not in kept:
            noted = self.noted.get()
            self._calls_made += 1
            return original(*args, **kwargs) if noted is None else self._run(noted, name, original, args, kwargs)
        if not kept[name]:
            raise RuntimeError(f"forward called {name!r} more often than when it was traced")
        result, given = kept[name].popleft()
        now, is_same = (args, kwargs), is_alike if given.is_written else self._is_same
        if not given.is_as_noted() or not (are_same_arguments(given.call, now) or is_same(given.call, now)):
            raise RuntimeError(
                f"{name} has run ahead of forward, and is called there with something else, or with tensors that were "
                "written to since: expected a forward that treats all batches alike, and modules before it that neither "
                "write in place to what it is given, nor replace parts of that, but for modules without parameters whose "
                "results it is given. Let what does so run behind the sharded modules, or on copies"
            )
        return result

    def _run(self, noted: Noted, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = GivenCall(args, kwargs)
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


class _Noting:
    __slots__ = ("_noted", "_processing", "_token")

    def __init__(self, processing: PostProcessing) -> None:
        self._processing = processing

    def __enter__(self) -> Noted:
        self._noted = Noted(self._processing.forwards)
        self._token = self._processing.noted.set(self._noted)
        return self._noted

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._processing.noted.reset(self._token)
        if error is not None:
            return
        by_value = is_by_value(self._processing.runs)
        self._processing.runs += 1
        for calls in self._noted.given.values():
            for given in calls:  # the modules may have written to it, which they do not a second time
                given.note(by_value)


class _Replaying:
    __slots__ = ("_kept", "_token", "_variable")

    def __init__(self, variable: ContextVar[Kept | None], results: Noted) -> None:
        self._variable = variable
        self._kept = {name: deque(zip(outputs, results.given[name], strict=True)) for name, outputs in results.items()}

    def __enter__(self) -> None:
        self._token = self._variable.set(self._kept)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._variable.reset(self._token)
        left = [name for name, outputs in self._kept.items() if outputs] if error is None else []
        if left:
            raise RuntimeError(f"forward called {', '.join(map(repr, left))} more rarely than when it was traced")


def _restore(module: nn.Module, before: Any) -> None:
    if before is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = before
