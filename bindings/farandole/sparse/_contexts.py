"""Context managers of each step: those of contextlib's generators make twice the calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

NOTHING: contextlib.nullcontext[None] = contextlib.nullcontext()


class OnError:
    """Calls a function with what is raised inside, and raises that on unless the function raises something else."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[BaseException], None]) -> None:
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._call(error)


def _refuse_end(error: BaseException) -> None:
    if isinstance(error, StopIteration):
        raise RuntimeError(
            "a stage or the model raised StopIteration, which only the iterator's __next__ may: it would pass for the end "
            "of the data"
        ) from error


ENDS_NOTHING = OnError(_refuse_end)
