"""The end of a backward by a call, as torch's DistributedDataParallel has it from 2.15 on."""

from __future__ import annotations

from farandole import _C


class FinalizesManually:
    """The part of the wrapper that leaves the wait for gradients to its caller."""

    _reducer: _C.GradReducer
    _finalizes_manually = False

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether backward returns without waiting for what it has sent, and :meth:`finalize_backward` waits, once for each
        backward that synchronizes. To be set between the end of one and the next forward, on all ranks.
        """
        return self._finalizes_manually

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if not isinstance(required, bool):
            raise TypeError(f"require_manual_backward_finalization={required!r}: expected a bool")
        self._reducer.require_manual_end(required)
        self._finalizes_manually = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether :meth:`finalize_backward` has to come after ``backward()`` has returned. Else it may be called inside,
        by a hook behind the last gradient. To be asked after the forward."""
        return self._finalizes_manually and self._reducer.needs_whole_backward()

    def finalize_backward(self) -> None:
        """Waits for the gradients of a backward, which are averages from then on.

        Raises:
            RuntimeError: no backward is to be ended so; or, inside of one, gradients are missing; or what backward raises
                in its place where it ends by itself.
        """
        self._reducer.finish_backward()
