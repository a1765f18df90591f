"""The part of the wrapper that says when gradients are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from farandole import _C


class SyncsGradients:
    """By the names of torch and of Megatron-core."""

    _reducer: _C.GradReducer
    _no_sync_depth: int
    require_backward_grad_sync: bool
    require_forward_param_sync: bool

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside it accumulate locally; the first backward whose forward was outside averages all.

        The forward decides, as in torch: a backward may be outside.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1
            self.require_backward_grad_sync = before

    @property
    def is_last_microbatch(self) -> bool:
        """Megatron-core's name: whether the next forward's backward averages. False inside :meth:`no_sync`."""
        return self.require_backward_grad_sync

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self.require_backward_grad_sync = value

    def _set_require_sync(self, require: bool) -> None:
        """Decides whether the next backward averages: for callers that run several per step. no_sync wins over it."""
        self.require_backward_grad_sync = require and self._no_sync_depth == 0
        if self.require_backward_grad_sync:
            self.require_forward_param_sync = True  # as after a forward whose backward averages
        self._reducer.set_require_sync(self.require_backward_grad_sync)

    def start_grad_sync(self) -> None:
        """Starts to average what has accumulated, for backwards that ran without synchronizing."""
        self._reducer.start_sync()

    def finish_grad_sync(self) -> None:
        """Waits for start_grad_sync; does nothing when no synchronization is open."""
        self._reducer.finish_sync()
