"""What the ranks tell each other of a batch before its data goes round: whether they have it, and the splits."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from farandole._C import Presence
from farandole.sparse._exchange_group import ExchangeGroup, FailedOnOthers

_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


# An attribute of an enum is a call, before Python 3.12.
BATCH, END_OF_DATA, FAILED = Presence.BATCH, Presence.END_OF_DATA, Presence.FAILED

SKIPPED = "batch {} is skipped on all ranks, since it has failed on others"


@dataclass(slots=True)
class Said:
    """What the ranks have together, and the row of each; who has failed, by global rank and why."""

    presence: Presence
    rows: list[list[int]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    def error(self, number: int) -> FailedOnOthers:
        """For a rank that has its batch, of this number."""
        reasons = "\n".join(f"rank {rank}, {reason}" for rank, reason in self.failed.items() if reason)
        return FailedOnOthers(f"{SKIPPED.format(number)}\n{reasons}")


class SplitsExchange:
    """One all-to-all of integers for each batch. The first column is who has the batch, so that the end of the data on
    one rank, or its failure to load it, reaches the others at no cost. One at a time."""

    def __init__(self, group: ExchangeGroup) -> None:
        self._group = group
        self.size = group.size
        self._columns = 0
        self._number = 0
        self._name = "" if group.group is None else f"farandole/sparse/{group.group.group_name}/{_count(group.group)}"
        self._told: list[str] = []  # keys of reasons, the last one first

    @property
    def name(self) -> str:
        """The same on all ranks, and no other's; empty for this rank alone."""
        return self._name

    def expect(self, columns: int) -> None:
        """So many integers come next, where this rank has no batch to tell by."""
        self._columns = columns

    @property
    def columns(self) -> int:
        return self._columns

    def agree(self, presence: Presence, reason: str = "", place: int = 0) -> Said:
        """Waits for all ranks, apart from any splits. Each has a row of one integer, ``place``."""
        return self._said(self._group.exchange_rows(self._agreement(presence, reason, place)))

    def post_agreement(self, presence: Presence, reason: str = "", place: int = 0) -> None:
        self._group.start_rows(self._agreement(presence, reason, place))

    def post(self, presence: Presence, rows: Sequence[Sequence[int]] | None, reason: str = "") -> None:
        """Starts it with a row of integers for each rank, equally many in all of them; None for a rank without the
        batch."""
        if rows is None:
            rows = [[0] * self._columns] * self.size
        self._columns = len(rows[0])
        self._tell(presence, reason)
        self._group.start_rows([column for row in rows for column in (presence, *row)])

    def has_come(self) -> bool:
        return self._group.rows_have_come()

    def wait(self) -> Said:
        return self._said(self._group.finish_rows())

    def _agreement(self, presence: Presence, reason: str, place: int) -> list[int]:
        self._tell(presence, reason)
        return [presence, place] * self.size

    def _tell(self, presence: Presence, reason: str) -> None:
        self._number += 1
        if presence == FAILED and self._group.group is not None:
            self._told.insert(0, self._key(self._group.rank))
            text = reason.encode(errors="backslashreplace").decode()  # names of files are not always text
            _store().set(self._told[0], text)

    def _said(self, received: list[int]) -> Said:
        if self._told:
            self._forget()
        width = len(received) // self.size
        said = received[::width]
        rest = [received[begin + 1 : begin + width] for begin in range(0, len(received), width)]
        if END_OF_DATA in said:
            return Said(END_OF_DATA)
        if FAILED not in said:
            return Said(BATCH, rest)
        failed = [rank for rank, what in enumerate(said) if what == FAILED]
        if self._group.group is None:
            return Said(FAILED, rest, {0: ""})
        ranks = dist.get_process_group_ranks(self._group.group)
        reasons = {ranks[rank]: _store().get(self._key(rank)).decode() for rank in failed}
        return Said(FAILED, rest, reasons)

    def _forget(self) -> None:
        """All ranks have read the reasons of exchanges before the one that has ended."""
        now = self._key(self._group.rank)
        while self._told and self._told[-1] != now:
            _store().delete_key(self._told.pop())

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._number}/{rank}"


def _count(group: dist.ProcessGroup) -> int:
    """How many of a group have been made; ranks make them together."""
    _exchanges[group] = _exchanges.get(group, 0) + 1
    return _exchanges[group]


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
