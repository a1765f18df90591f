"""Calls that return once they are done, so that no others are under way beside them: objects, and their kin."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from support.drawn.memory import bytes_of
from support.drawn.operation import Operation, Run
from support.drawn.reductions import Exactly

_LIMIT = datetime.timedelta(seconds=60)


class _Objects:
    """One of each rank, of sizes of their own."""

    def __init__(self, op: Operation) -> None:
        self._op, self._counts = op, op.counts(op.rng())

    def of(self, rank: int, *what: int) -> Any:
        part = self._op.part(rank, *what, numel=self._counts[(rank + sum(what)) % self._op.size])
        return {"rank": rank, "what": list(what), "data": bytes_of(part).numpy().tobytes()}


def all_gather_object(op: Operation, run: Run) -> None:
    drawn, got = _Objects(op), [None] * op.size
    dist.all_gather_object(got, drawn.of(run.me), group=run.group)
    run.expect(got, [drawn.of(r) for r in range(op.size)])


def gather_object(op: Operation, run: Run) -> None:
    drawn, is_root = _Objects(op), run.me == op.root
    got = [None] * op.size if is_root else None
    dist.gather_object(drawn.of(run.me), got, group=run.group, group_dst=op.root)
    run.expect(got, [drawn.of(r) for r in range(op.size)] if is_root else None)


def broadcast_object_list(op: Operation, run: Run) -> None:
    drawn, number = _Objects(op), op.rng().randrange(1, 4)
    objects = [drawn.of(run.me, i) for i in range(number)]
    dist.broadcast_object_list(objects, group=run.group, group_src=op.root)
    run.expect(objects, [drawn.of(op.root, i) for i in range(number)])


def scatter_object_list(op: Operation, run: Run) -> None:
    drawn, got = _Objects(op), [None]
    given = [drawn.of(op.root, r) for r in range(op.size)] if run.me == op.root else None
    dist.scatter_object_list(got, given, group=run.group, group_src=op.root)
    run.expect(got, [drawn.of(op.root, run.me)])


def object_messages(op: Operation, run: Run) -> None:
    """From each rank to the next one, one pair after the other."""
    drawn = _Objects(op)
    for source in range(op.size - 1):
        if run.me == source:
            dist.send_object_list([drawn.of(source), source], group=run.group, group_dst=source + 1)
        elif run.me == source + 1:
            got = [None, None]
            dist.recv_object_list(got, group=run.group, group_src=source)
            run.expect(got, [drawn.of(source), source])


def messages_in_turn(op: Operation, run: Run) -> None:
    """Each is sent and received before its ranks come to the next one; some from whoever sends it."""
    rng = op.rng()
    for number in range(rng.randrange(1, 6) if op.size > 1 else 0):
        source, destination = rng.sample(range(op.size), 2)
        knows_source, numel = rng.random() < 0.7, op.numel if op.is_large else max(1, op.count(rng))
        tag = op.tag if knows_source else 100 + (op.seed * 8 + number) % 1_000_000
        if run.me == source:
            dist.send(run.give(op.part(number, numel=numel)), group=run.group, tag=tag, group_dst=destination)
        elif run.me == destination:
            into = run.take(numel, lambda number=number, numel=numel: Exactly(op.part(number, numel=numel)))
            found = dist.recv(into, group=run.group, tag=tag, group_src=source if knows_source else None)
            run.expect(found, dist.get_global_rank(run.group, source))


def monitored_barrier(op: Operation, run: Run) -> None:
    # dist.monitored_barrier of torch 2.11 is for a group whose backend is named gloo.
    run.group.monitored_barrier(_LIMIT, op.rng().random() < 0.5)


def broadcast_coalesced(op: Operation, run: Run) -> None:
    """As torch's DDP does with buffers, in pieces of some bytes."""
    rng = op.rng()
    counts = op.counts(rng)
    tensors = [
        run.change(op.part(run.me, j, numel=n), lambda j=j, n=n: Exactly(op.part(op.root, j, numel=n)))
        for j, n in enumerate(counts)
    ]
    dist._broadcast_coalesced(run.group, tensors, rng.choice([1, 4096, 1 << 20]), op.root)


BLOCKING = {
    function.__name__: function
    for function in (
        all_gather_object, gather_object, broadcast_object_list, scatter_object_list, object_messages,
        messages_in_turn, monitored_barrier, broadcast_coalesced,
    )
}  # fmt: skip
