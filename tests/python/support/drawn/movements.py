"""Collectives that move data, by kind: each makes its tensors, says what they must hold, and calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from support.drawn.operation import Operation, Run
from support.drawn.reductions import Exactly


def _expect(op: Operation, *who: int, numel: int | None = None) -> Callable[[], Exactly]:
    return lambda: Exactly(op.part(*who, numel=numel))


def broadcast(op: Operation, run: Run) -> None:
    root = op.part(op.root)
    run.call(dist.broadcast, run.change(op.part(run.me), lambda: Exactly(root), rows=True), group_src=op.root)


def all_gather(op: Operation, run: Run) -> None:
    outputs = [run.take(op.numel, _expect(op, r), rows=True) for r in range(op.size)]
    run.call(dist.all_gather, outputs, run.give(op.part(run.me), rows=True))


def all_gather_uneven(op: Operation, run: Run) -> None:
    counts = op.counts(op.rng())
    outputs = [run.take(n, _expect(op, r, numel=n)) for r, n in enumerate(counts)]
    run.call(dist.all_gather, outputs, run.give(op.part(run.me, numel=counts[run.me])))


def _all_parts(op: Operation, j: int = 0, numel: int | None = None) -> Callable[[], Exactly]:
    return lambda: Exactly(torch.cat([_raw(op.part(r, j, numel=numel)) for r in range(op.size)]).view(op.dtype))


def _raw(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def all_gather_tensor(op: Operation, run: Run) -> None:
    output = run.take(op.numel * op.size, _all_parts(op))
    run.call(dist.all_gather_into_tensor, output, run.give(op.part(run.me, 0)))


def all_gather_tensor_manager(op: Operation, run: Run) -> None:
    counts = op.counts(op.rng())
    with dist._coalescing_manager(run.group, async_ops=run.is_async) as manager:
        for j, n in enumerate(counts):
            output = run.take(n * op.size, _all_parts(op, j, n))
            dist.all_gather_into_tensor(output, run.give(op.part(run.me, j, numel=n)), group=run.group)
    for work in manager.works:
        run.add(work)


def all_gather_tensor_coalesced(op: Operation, run: Run) -> None:
    counts = op.counts(op.rng())
    outputs = [run.take(n * op.size, _all_parts(op, j, n)) for j, n in enumerate(counts)]
    inputs = [run.give(op.part(run.me, j, numel=n)) for j, n in enumerate(counts)]
    run.add(run.group.allgather_into_tensor_coalesced(outputs, inputs))


def all_gather_coalesced(op: Operation, run: Run) -> None:
    counts = op.counts(op.rng())
    lists = [[run.take(n, _expect(op, r, j, numel=n)) for j, n in enumerate(counts)] for r in range(op.size)]
    run.add(run.group.allgather_coalesced(lists, [run.give(op.part(run.me, j, numel=n)) for j, n in enumerate(counts)]))


def gather(op: Operation, run: Run) -> None:
    is_root = run.me == op.root
    outputs = [run.take(op.numel, _expect(op, r), rows=True) for r in range(op.size)] if is_root else None
    run.call(dist.gather, run.give(op.part(run.me), rows=True), outputs, group_dst=op.root)


def gather_tensor(op: Operation, run: Run) -> None:
    output = run.take(op.numel * op.size, _all_parts(op)) if run.me == op.root else None
    run.call(dist.gather_into_tensor, run.give(op.part(run.me, 0)), output, group_dst=op.root)


def scatter(op: Operation, run: Run) -> None:
    parts = [run.give(op.part(r), rows=True) for r in range(op.size)] if run.me == op.root else None
    run.call(dist.scatter, run.take(op.numel, _expect(op, run.me), rows=True), parts, group_src=op.root)


def all_to_all(op: Operation, run: Run) -> None:
    rng = op.rng()
    counts = [op.counts(rng) for _ in range(op.size)]
    outputs = [run.take(counts[r][run.me], _expect(op, r, run.me, numel=counts[r][run.me])) for r in range(op.size)]
    run.call(dist.all_to_all, outputs, [run.give(op.part(run.me, r, numel=n)) for r, n in enumerate(counts[run.me])])


def all_to_all_even(op: Operation, run: Run) -> None:
    outputs = [run.take(op.numel, _expect(op, r, run.me), rows=True) for r in range(op.size)]
    run.call(dist.all_to_all, outputs, [run.give(op.part(run.me, r), rows=True) for r in range(op.size)])


def all_to_all_single(op: Operation, run: Run) -> None:
    rng = op.rng()
    counts = [op.counts(rng) for _ in range(op.size)]
    takes = [counts[r][run.me] for r in range(op.size)]

    def all_parts() -> Exactly:
        return Exactly(torch.cat([_raw(op.part(r, run.me, numel=n)) for r, n in enumerate(takes)]).view(op.dtype))

    sent = torch.cat([_raw(op.part(run.me, r, numel=n)) for r, n in enumerate(counts[run.me])]).view(op.dtype)
    unit = op.dtype.itemsize if run.as_bytes else 1
    splits = [n * unit for n in takes], [n * unit for n in counts[run.me]]
    run.call(dist.all_to_all_single, run.take(sum(takes), all_parts), run.give(sent), *splits)


def all_to_all_single_even(op: Operation, run: Run) -> None:
    def whole(rank: int) -> Tensor:
        return op.part(rank, numel=op.numel * op.size)

    def all_parts() -> Exactly:
        mine = slice(run.me * op.numel * op.dtype.itemsize, (run.me + 1) * op.numel * op.dtype.itemsize)
        return Exactly(torch.cat([_raw(whole(r))[mine] for r in range(op.size)]).view(op.dtype))

    run.call(dist.all_to_all_single, run.take(op.numel * op.size, all_parts), run.give(whole(run.me)))


def barrier(op: Operation, run: Run) -> None:
    run.call(dist.barrier)


MOVEMENTS = {
    function.__name__: function
    for function in (
        broadcast, all_gather, all_gather_uneven, all_gather_tensor, all_gather_tensor_manager,
        all_gather_tensor_coalesced, all_gather_coalesced, gather, scatter, all_to_all, all_to_all_even,
        all_to_all_single, all_to_all_single_even, barrier,
    )
}  # fmt: skip
if hasattr(dist, "gather_into_tensor"):  # torch 2.11 has not
    MOVEMENTS["gather_tensor"] = gather_tensor
# All ranks get the same.
GIVES_ALL_THE_SAME = [
    "broadcast", "all_gather", "all_gather_uneven", "all_gather_tensor", "all_gather_tensor_manager",
    "all_gather_tensor_coalesced", "all_gather_coalesced",
]  # fmt: skip
