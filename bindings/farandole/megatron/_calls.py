"""Calls of users' functions, which are as old as they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def call_with_what_it_takes(function: Callable[..., Any], *args: Any, **optional: Any) -> Any:
    """Leaves out the keyword arguments that the function does not know."""
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        optional = {name: value for name, value in optional.items() if name in parameters}
    return function(*args, **optional)
