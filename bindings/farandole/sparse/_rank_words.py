"""What ranks tell each other by the store, for what is rare: other steps say nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from farandole.sparse._joint_steps import JointSteps

_FIRST_LOOK, _LONGEST_LOOK = 0.0001, 0.005  # seconds between two; others are mostly about to say theirs


class RankWords:
    """
    Args:
        topic: no other's of the same pipelines.
    """

    def __init__(self, joint: JointSteps, topic: str) -> None:
        self._joint = joint
        self._topic = topic
        self._said = ""  # a key

    def exchange(self, turn: int, word: str, until: float) -> dict[int, str]:
        """Those of all ranks, by global rank, in this turn, which each has once; of who has said nothing by that time,
        and where no further step can be taken, it is empty.

        Raises:
            RuntimeError: of the store.
        """
        store, group = dist.distributed_c10d._get_default_store(), self._joint.group
        assert group.group is not None
        keys = [self._key(turn, rank) for rank in range(group.size)]
        store.set(keys[group.rank], word)
        look = _FIRST_LOOK
        while not store.check(keys) and not self._joint.hears_of_loss() and time.monotonic() <= until:
            time.sleep(look)
            look = min(2 * look, _LONGEST_LOOK)
        if self._said:  # which all have read
            _forget(store, self._said)
        self._said = keys[group.rank]
        ranks = dist.get_process_group_ranks(group.group)
        return {
            rank: store.get(key).decode() if store.check([key]) else "" for rank, key in zip(ranks, keys, strict=True)
        }

    def say(self, turn: int, word: str) -> Callable[[], None]:
        """This rank's, and waits for nobody's; what it returns takes it back."""
        store, key = dist.distributed_c10d._get_default_store(), self._key(turn, self._joint.group.rank)
        store.set(key, word)
        return partial(_forget, store, key)

    def _key(self, turn: int, rank: int) -> str:
        return f"{self._joint.exchange.name}/{self._topic}/{turn}/{rank}"


def _forget(store: dist.Store, key: str) -> None:
    with contextlib.suppress(RuntimeError):  # not every store can
        store.delete_key(key)
