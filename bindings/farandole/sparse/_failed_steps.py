"""A forward, a backward or an optimizer step that raised: on all ranks, or on some, for whom the others wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch import nn

from farandole.sparse._exchange_group import FailedOnOthers
from farandole.sparse._joint_steps import JointSteps
from farandole.sparse._rank_words import RankWords


class FailedSteps:
    """Tells the two apart. Only who fails asks, by the store, so that other steps say nothing."""

    def __init__(self, joint: JointSteps) -> None:
        self._joint = joint
        self._words = RankWords(joint, "failed")
        self._times = 0

    def meet(self, stage: str, batch: str, error: BaseException, model: nn.Module, patience: float) -> None:
        """After an error in a stage of a batch: returns when all ranks have failed in that stage as often. Else the
        steps are lost, after so many seconds: the collectives of these ranks are out of step.

        Raises:
            FailedOnOthers: that was on another rank, which has ended a collective of this one.
        """
        if self._joint.group.size == 1:
            return
        if self._joint.lost or self._joint.hears_of_loss():
            if isinstance(error, RuntimeError):
                raise FailedOnOthers(f"the {stage} of {batch} cannot end: {self._joint.lost}") from error
            return
        self._times += 1
        try:
            others = self._others(stage, time.monotonic() + patience)
        except RuntimeError as gone:  # the store, as where its process has died
            others = f"no other rank can be asked ({gone})"
        if others:
            self._joint.lose(f"the {stage} of {batch}, and {others}", error, model)

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """Inside, this rank waits for all others after steps of which none has failed here: who has failed in one need not
        wait for it."""
        if self._joint.group.size == 1:
            yield
            return
        take_back = self._words.say(self._times + 1, what)
        try:
            yield
        finally:  # who has failed has read it, or nobody has
            take_back()

    def _others(self, stage: str, until: float) -> str:
        """Who has not failed as this rank."""
        words = self._words.exchange(self._times, stage, until)
        if self._joint.lost:
            return ""
        others = {rank: where for rank, where in words.items() if where != stage}
        return ", ".join(f"rank {rank} {f'in the {where}' if where else 'has not'}" for rank, where in others.items())
