"""When inputs are no longer sent ahead, since what they are computed with changes before each forward."""

from __future__ import annotations

_IN_A_ROW = 3  # batches that were exchanged again
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # batches that stay in their forward, until one goes ahead again


class InForward:
    """Which batches are exchanged in their forward alone, as in a plain loop, instead of ahead and then again there.

    All ranks decide alike, with no word about it: they exchange the same batches in the same order, and agree on those
    that are exchanged again.

    Attributes:
        left: batches, of those that come next, which stay in their forward.
        in_a_row: batches that went ahead and were exchanged again, since the last one that was not.
    """

    __slots__ = ("_pause", "in_a_row", "left")

    def __init__(self) -> None:
        self.left = 0
        self.in_a_row = 0
        self._pause = _FIRST_PAUSE

    def was_exchanged_again(self) -> bool:
        """A batch that went ahead was; whether the next ones stay in their forward for it."""
        self.in_a_row += 1
        if self.in_a_row < _IN_A_ROW:
            return False
        self.left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return True

    def was_right(self) -> None:
        """What went ahead for a batch was what its forward gives."""
        self.in_a_row, self._pause = 0, _FIRST_PAUSE
