"""Batches whose inputs are exchanged a second time, in their forward, since what had gone ahead for them was not theirs;
and those after them whose inputs do not go ahead, for that."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator


class ExchangedAgain:
    """How many there were, and why; the first one of each kind warns."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()  # by reason
        self._in_forward: Counter[str] = Counter()  # those after them
        self._reason = ""  # the last one

    def note(
        self, number: int, run: Iterable[str], attributes: Iterable[str], is_other_mode: bool, in_forward: bool
    ) -> None:
        """
        Args:
            number: of the batch.
            run: names of the modules that had run ahead for it, and would do something else now.
            attributes: names of those of the model that inputs were computed with, and that have changed since.
            is_other_mode: the model has another one now; else the modules were changed, on this rank or another.
            in_forward: whether the batches after it stay in their forward.
        """
        reason = self._reason = " and ".join(_reasons(_named(run), _named(attributes), is_other_mode))
        if not self._numbers:
            warnings.warn(
                f"batch {number} exchanges its inputs again, in its forward, since {reason}: correct, and slow where it is "
                "so for each batch. Give what changes with the batch, or change it less often; explain() counts them",
                stacklevel=7,
            )
        if in_forward and not self._in_forward:
            warnings.warn(
                f"batches after {number} exchange their inputs once, in the forward, since {reason}, several times in a row: "
                "now and then one goes ahead to see whether that is over; explain() counts them",
                stacklevel=7,
            )
        self._numbers[reason] += 1

    def note_in_forward(self) -> None:
        """A forward of one that stays in it."""
        self._in_forward[self._reason] += 1

    def lines(self) -> list[str]:
        return [
            f"{number} {'batch has' if number == 1 else 'batches have'} exchanged inputs again, in the forward, since {reason}"
            for reason, number in self._numbers.items()
        ] + [
            f"{number} {'batch has' if number == 1 else 'batches have'} exchanged inputs once, in the forward, since {reason}, "
            "several times in a row"
            for reason, number in self._in_forward.items()
        ]


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _reasons(run: str, attributes: str, is_other_mode: bool) -> Iterator[str]:
    if attributes:
        yield f"{attributes} was changed after inputs had been computed with it"
    if is_other_mode:
        yield f"the mode of the model was changed after {run} had run ahead"
    elif run:
        yield f"{run} was changed after it had run ahead"
