"""What the ranks tell each other of a batch before its data goes round: whether they have it, and the splits."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from farandole._C import Presence

_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class SplitsExchange:
    """One all-to-all of integers for each batch. The first column is who has the batch, so that the end of the data on
    one rank, or its failure to load it, reaches the others at no cost. One batch at a time.

    Args:
        group: its ranks; None is this rank alone.
        device: where tensors for the group have to be.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._columns = 0
        self._number = 0
        self._name = "" if group is None else f"farandole/sparse/{group.group_name}/{_count(group)}"
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None
        self._told: list[str] = []  # keys of reasons, the last one first

    @property
    def size(self) -> int:
        return 1 if self._group is None else self._group.size()

    def expect(self, columns: int) -> None:
        """So many integers come next, where this rank has no batch to tell by."""
        self._columns = columns

    def agree(self, presence: Presence, reason: str = "") -> Presence:
        """Waits for all ranks before anything is known of the splits."""
        columns, self._columns = self._columns, 0
        self.post(presence, [[] for _ in range(self.size)], reason)
        said, _ = self.wait()
        self._columns = columns
        return said

    def post(self, presence: Presence, rows: Sequence[Sequence[int]] | None, reason: str = "") -> None:
        """Starts it with a row of integers for each rank, equally many in all of them; None for a rank without the
        batch."""
        if rows is None:
            rows = [[0] * self._columns for _ in range(self.size)]
        self._columns = len(rows[0])
        self._number += 1
        sent = torch.tensor([[presence.value, *row] for row in rows], dtype=torch.int64)
        if self._group is None:
            self._pending = sent, None
            return
        if presence == Presence.FAILED:
            self._told.insert(0, self._key(self._group.rank()))
            _store().set(self._told[0], reason)
        sent = sent.to(self._device)
        received = torch.empty_like(sent)
        self._pending = received, dist.all_to_all_single(received, sent, group=self._group, async_op=True)

    def wait(self) -> tuple[Presence, list[list[int]]]:
        """What the ranks have together, and the row of each.

        Raises:
            RuntimeError: another rank has failed; names it and says why.
        """
        assert self._pending is not None
        received, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
            self._forget()
        rows = received.tolist()
        said = [row[0] for row in rows]
        if Presence.END_OF_DATA.value in said:
            return Presence.END_OF_DATA, []
        failed = [rank for rank, what in enumerate(said) if what == Presence.FAILED.value]
        if not failed:
            return Presence.BATCH, [row[1:] for row in rows]
        if self._group is None or self._group.rank() in failed:
            return Presence.FAILED, []
        ranks = dist.get_process_group_ranks(self._group)
        reasons = [f"rank {ranks[rank]}: {_store().get(self._key(rank)).decode()}" for rank in failed]
        raise RuntimeError("a batch is skipped on all ranks, since it has failed on others\n" + "\n".join(reasons))

    def _forget(self) -> None:
        """All ranks have read the reasons of exchanges before the one that has ended."""
        now = self._key(dist.get_rank(self._group))
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
