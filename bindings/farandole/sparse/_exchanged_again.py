"""Batches whose inputs are exchanged a second time, in their forward, since what had gone ahead for them was not theirs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable


class ExchangedAgain:
    """How many there were, and why; the first one warns."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()  # by reason

    def note(self, number: int, names: Iterable[str], is_other_mode: bool) -> None:
        """
        Args:
            number: of the batch.
            names: of the modules that had run ahead for it.
            is_other_mode: the model has another one now; else the modules were changed, on this rank or another.
        """
        run = ", ".join(map(repr, names))
        what = f"the mode of the model was changed after {run}" if is_other_mode else f"{run} was changed after it"
        reason = f"{what} had run ahead"
        if not self._numbers:
            warnings.warn(
                f"batch {number} exchanges its inputs again, in its forward, since {reason}: correct, and slow where it is "
                "so for each batch. Give what changes with the batch, or change it less often; explain() counts them",
                stacklevel=7,
            )
        self._numbers[reason] += 1

    def lines(self) -> list[str]:
        return [
            f"{number} {'batch has' if number == 1 else 'batches have'} exchanged inputs again, in the forward, since {reason}"
            for reason, number in self._numbers.items()
        ]
