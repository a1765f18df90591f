"""Messages between random pairs of a group; each rank posts its sends first, but for those of a batch."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from support.drawn.operation import Operation, Run
from support.drawn.reductions import Exactly


class _Pairs:
    def __init__(self, op: Operation) -> None:
        rng = op.rng()
        self.pairs = [(rng.randrange(op.size), rng.randrange(op.size)) for _ in range(rng.randrange(1, 6))]

    def sends(self, op: Operation, run: Run) -> list[tuple[Tensor, int]]:
        return [(run.give(op.part(i)), b) for i, (a, b) in enumerate(self.pairs) if a == run.me]

    def receives(self, op: Operation, run: Run) -> list[tuple[Tensor, int]]:
        return [
            (run.take(op.numel, lambda i=i: Exactly(op.part(i))), a)
            for i, (a, b) in enumerate(self.pairs)
            if b == run.me
        ]


def messages(op: Operation, run: Run) -> None:
    drawn = _Pairs(op)
    for x, b in drawn.sends(op, run):
        run.add(dist.isend(x, group=run.group, tag=op.tag, group_dst=b))
    for x, a in drawn.receives(op, run):
        run.add(dist.irecv(x, group=run.group, tag=op.tag, group_src=a))


def batch(op: Operation, run: Run) -> None:
    drawn = _Pairs(op)
    ops = [dist.P2POp(dist.isend, x, group=run.group, group_peer=b) for x, b in drawn.sends(op, run)]
    ops += [dist.P2POp(dist.irecv, x, group=run.group, group_peer=a) for x, a in drawn.receives(op, run)]
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


def gloo_can(op: Operation) -> bool:
    return op.numel > 0 and all(a != b for a, b in _Pairs(op).pairs)
