"""Windows of gradient accumulation of several pipelines of one model, which has its gradients once."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

_pipelines: weakref.WeakSet[Any] = weakref.WeakSet()  # whose windows have several batches
_has_any = False  # ever; the length of a WeakSet is a call of Python's


def note_windows(pipeline: Any) -> None:
    """It has windows of several batches."""
    global _has_any
    _has_any = True
    _pipelines.add(pipeline)


def warn_of_others(pipeline: Any) -> None:
    """Before gradients are zeroed for a window of this pipeline."""
    if not _has_any:
        return
    for other in _pipelines:
        if other is not pipeline and other._window.filled and other._model is pipeline._model:
            warnings.warn(
                f"the window of another pipeline of this model is open, after {other._window.filled} of "
                f"{other._window.size} batches: its gradients are zeroed. Take turns at the ends of windows, or "
                "reset() the other one",
                stacklevel=4,
            )
