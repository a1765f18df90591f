"""What several classes ask of their arguments."""

from __future__ import annotations

from typing import Any


def refuse_no_bool(name: str, value: Any, besides: str = "") -> None:
    """
    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected a bool{besides}")
