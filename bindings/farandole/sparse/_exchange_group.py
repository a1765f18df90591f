"""The ranks that exchange inputs, and how one of them gives that up without leaving the others to wait for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from farandole import _C

Splits = Sequence[Sequence[int]]  # by tensor and rank, along dimension 0


@dataclass(frozen=True)
class GivenUp:
    """What a rank tells the others that it leaves in the middle of an exchange."""

    rank: int  # global
    what: str  # stage, batch and error
    is_lost: bool  # the group itself is gone (a rank died, a timeout): no other one of these ranks is any better


class FailedOnOthers(RuntimeError):
    """Raised on the ranks that hear of it, for the batch that it is about."""


class ExchangeGroup:
    """Starts exchanges and waits for them. A wait ends when another rank gives the group up: farandole ends it at once,
    gloo's are looked after five times a second.

    Failures are noted where they are caught: a context would cost 45 calls in each step.

    Args:
        group: None is this rank alone.
        device: where tensors for the group have to be.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.has_failed = False  # an exchange itself, here
        self._memory = _C.StagingMemory()
        self._rows = None if group is None else _C.RowExchange(group, device)
        self._alone: list[int] = []

    def packed(self, sent: Sequence[torch.Tensor], splits: Splits) -> _C.TensorExchange:
        """The all-to-all of each of these, which are contiguous, and copied. Nothing is under way yet."""
        assert self.group is not None
        return _C.TensorExchange(self.group, self._memory, sent, splits)

    def start_tensors(self, exchange: _C.TensorExchange, received_splits: Splits) -> None:
        exchange.expect(received_splits)  # what that refuses was not sent
        try:
            exchange.start()
        except BaseException:
            self.has_failed = True
            raise

    def finish_tensors(self, exchange: _C.TensorExchange) -> list[torch.Tensor]:
        """What has come for them; any number of times."""
        try:
            return exchange.wait()
        except BaseException:
            self.has_failed = True
            raise

    def start_rows(self, rows: Sequence[int]) -> None:
        """A row of integers for each rank, one after the other and of the same length; one exchange at a time."""
        if self._rows is None:
            self._alone = list(rows)
            return
        try:
            self._rows.start(rows)
        except BaseException:
            self.has_failed = True
            raise

    def rows_have_come(self) -> bool:
        return self._rows is None or self._rows.has_come

    def finish_rows(self) -> list[int]:
        """The row of each rank for this one."""
        if self._rows is None:
            return self._alone
        try:
            return self._rows.finish()
        except BaseException:
            self.has_failed = True
            raise

    def exchange_rows(self, rows: Sequence[int]) -> list[int]:
        """Both at once."""
        if self._rows is None:
            return list(rows)
        try:
            return self._rows.exchange(rows)
        except BaseException:
            self.has_failed = True
            raise

    def given_up(self) -> GivenUp | None:
        text = "" if self.group is None else _C.abandonment_of(self.group)
        return GivenUp(**json.loads(text)) if text else None

    def give_up(self, error: BaseException, where: str, is_lost: bool = False) -> GivenUp:
        """For an error in the middle of an exchange, or one that ends all: tells the others, or says which of them was the
        first to fail."""
        known = self.given_up()
        if known is not None:
            return known
        mine = GivenUp(dist.get_rank(), f"{where}: {type(error).__name__}: {error}", is_lost or self.has_failed)
        if self.group is not None:
            _C.abandon_group(self.group, json.dumps(asdict(mine)))
        return mine
