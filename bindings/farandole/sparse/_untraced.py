"""Forwards in the place of those of modules, which torch.compile leaves as they are, and which copies do not have."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any


class UntracedForward:
    """A copy of the module, or one that is loaded, has the original forward, of its own.

    Args:
        function: what is called instead.
        original: the module's forward before.
    """

    def __init__(self, function: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._function = _untraced(function)
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return operator.itemgetter(0), ((self._original,),)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where torch.compile is in use by now: it is loaded slowly."""
    dynamo = sys.modules.get("torch._dynamo")
    result: Callable[..., Any] = function if dynamo is None else dynamo.disable(function)
    return result
