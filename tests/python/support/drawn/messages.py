"""Messages between random pairs of a group; each rank posts its sends first, but for those of a batch."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from support.drawn.operation import Operation, Run
from support.drawn.reductions import Exactly


class _Pairs:
    """Who sends what to whom: several messages may have one tag, and come in their order."""

    def __init__(self, op: Operation) -> None:
        rng = op.rng()
        self.pairs = [(rng.randrange(op.size), rng.randrange(op.size)) for _ in range(rng.randrange(1, 6))]
        self.counts = [op.numel if op.is_large else op.count(rng) for _ in self.pairs]
        self.tags = [rng.choice([op.tag, op.tag, op.tag ^ 1]) for _ in self.pairs]

    def sends(self, op: Operation, run: Run) -> list[tuple[Tensor, int, int]]:
        """With the rank to which, and the tag."""
        drawn = enumerate(zip(self.pairs, self.counts, self.tags))
        return [(run.give(op.part(i, numel=n)), b, tag) for i, ((a, b), n, tag) in drawn if a == run.me]

    def receives(self, op: Operation, run: Run) -> list[tuple[Tensor, int, int]]:
        """With the rank from which, and the tag."""
        drawn = enumerate(zip(self.pairs, self.counts, self.tags))
        return [
            (run.take(n, lambda i=i, n=n: Exactly(op.part(i, numel=n))), a, tag)
            for i, ((a, b), n, tag) in drawn
            if b == run.me
        ]


def messages(op: Operation, run: Run) -> None:
    drawn = _Pairs(op)
    for x, b, tag in drawn.sends(op, run):
        run.add(dist.isend(x, group=run.group, tag=tag, group_dst=b))
    for x, a, tag in drawn.receives(op, run):
        run.add(dist.irecv(x, group=run.group, tag=tag, group_src=a))


def batch(op: Operation, run: Run) -> None:
    drawn = _Pairs(op)
    ops = [dist.P2POp(dist.isend, x, group=run.group, tag=tag, group_peer=b) for x, b, tag in drawn.sends(op, run)]
    ops += [dist.P2POp(dist.irecv, x, group=run.group, tag=tag, group_peer=a) for x, a, tag in drawn.receives(op, run)]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        run.add(work)


def any_source(op: Operation, run: Run) -> None:
    """One message from each other rank to the root, which does not know from whom the next one comes."""
    tag = 100 + op.seed % 1_000_000  # of no other operation
    if run.me != op.root:
        run.add(dist.isend(run.give(op.part(run.me)), group=run.group, tag=tag, group_dst=op.root))
        return
    for _ in range(op.size - 1):
        source: list[int] = []
        into = run.take(op.numel, lambda source=source: Exactly(op.part(source[0])))
        run.add(_Sourced(dist.irecv(into, group=run.group, tag=tag), source))


class _Sourced:
    """The work of a receive, which notes where its message came from."""

    def __init__(self, work: dist.Work, source: list[int]) -> None:
        self._work, self._source = work, source

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._source[:] = [self._work._source_rank()]


MESSAGES = {function.__name__: function for function in (messages, batch, any_source)}


def has_own(op: Operation) -> bool:
    """Whether a rank sends something to itself."""
    return any(a == b for a, b in _Pairs(op).pairs)
