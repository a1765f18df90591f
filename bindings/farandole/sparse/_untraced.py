"""Functions that torch.compile leaves as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where torch.compile is in use by now: it is loaded slowly."""
    dynamo = sys.modules.get("torch._dynamo")
    result: Callable[..., Any] = function if dynamo is None else dynamo.disable(function)
    return result
