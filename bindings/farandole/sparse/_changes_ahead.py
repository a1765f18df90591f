"""Modules that run ahead and are changed between two steps: whether a batch's inputs are exchanged again."""

from __future__ import annotations

import time

from torch import nn

from farandole.sparse._exchange_group import FailedOnOthers
from farandole.sparse._joint_steps import JointSteps
from farandole.sparse._rank_words import RankWords

_SAME, _OTHER = "the same inputs", "other inputs"


class ChangesAhead:
    """Ranks that have seen a change agree; others, who go on with what has come, ask nobody."""

    def __init__(self, joint: JointSteps) -> None:
        self._joint = joint
        self._words = RankWords(joint, "changed")
        self._turn = 0
        self._alone = 0  # how often in a row no other rank had seen the change

    def next_turn(self) -> None:
        """Another forward, on all ranks."""
        self._turn += 1

    def gives_others(self, what: str, is_other: bool, model: nn.Module, patience: float) -> bool:
        """Whether the inputs of this forward's batch are to be exchanged in it, since a change gives other ones on any
        rank.

        Args:
            what: has changed, and before what.
            is_other: whether this rank's are.
            patience: seconds in which other ranks come to this.

        Raises:
            FailedOnOthers: no further step can be taken.
            RuntimeError: so it is, since some rank has seen no change, and does not take part.
        """
        if self._joint.group.size == 1:
            return is_other
        # What is done by one rank alone, and by which it computes nothing, is not to hold up each step.
        patience = patience if is_other else patience / 2**self._alone
        words = self._words.exchange(self._turn, _OTHER if is_other else _SAME, time.monotonic() + patience)
        if self._joint.lost:
            raise FailedOnOthers(f"{what} cannot be agreed on: {self._joint.lost}")
        without = [str(rank) for rank, word in words.items() if not word]
        self._alone = self._alone + 1 if without else 0
        others = [str(rank) for rank, word in words.items() if word == _OTHER]
        if not others or not without:
            return bool(others)
        error = RuntimeError(
            f"it gives other inputs on rank {', '.join(others)}, and was not seen on rank {', '.join(without)}: expected "
            "the same change on all ranks"
        )
        self._joint.lose(what, error, model)
        raise error
