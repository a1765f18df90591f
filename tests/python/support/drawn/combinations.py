"""Collectives that reduce, by kind: each makes its tensors, says what they must hold, and calls."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from support.drawn.memory import elements
from support.drawn.operation import Operation, Run
from support.drawn.reductions import Check, Exactly

SPARSE_DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool,
]  # fmt: skip


def _reduced(op: Operation, run: Run, *what: int, numel: int | None = None) -> Callable[[], Check]:
    return lambda: run.reduced([op.part(r, *what, numel=numel) for r in range(op.size)])


def all_reduce(op: Operation, run: Run) -> None:
    run.call(dist.all_reduce, run.change(op.part(run.me), _reduced(op, run), rows=True),
             op.reduce_op(run.me))  # fmt: skip


def _many(op: Operation, run: Run) -> list[torch.Tensor]:
    counts = op.counts(op.rng())
    return [run.change(op.part(run.me, j, numel=n), _reduced(op, run, j, numel=n)) for j, n in enumerate(counts)]


def all_reduce_coalesced(op: Operation, run: Run) -> None:
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op.reduce_op(run.me)
    run.add(run.group.allreduce_coalesced(_many(op, run), options))


def all_reduce_manager(op: Operation, run: Run) -> None:
    reduce_op = op.reduce_op(run.me)
    with dist._coalescing_manager(run.group, async_ops=run.is_async) as manager:
        for tensor in _many(op, run):
            dist.all_reduce(tensor, reduce_op, group=run.group)
    for work in manager.works:
        run.add(work)


def reduce(op: Operation, run: Run) -> None:
    mine = op.part(run.me)
    # Over gloo the others get parts of the sum.
    expected = _reduced(op, run) if run.me == op.root else lambda: Exactly(mine)
    if run.is_plain and run.me != op.root:
        tensor = mine.clone()
    else:
        tensor = run.change(mine, expected, rows=True)
    run.call(dist.reduce, tensor, op=op.reduce_op(run.me), group_dst=op.root)


def reduce_scatter(op: Operation, run: Run) -> None:
    inputs = [run.give(op.part(run.me, r), rows=True) for r in range(op.size)]
    output = run.take(op.numel, _reduced(op, run, run.me), rows=True)
    run.call(dist.reduce_scatter, output, inputs, op.reduce_op(run.me))


def reduce_scatter_uneven(op: Operation, run: Run) -> None:
    counts = op.counts(op.rng())
    inputs = [run.give(op.part(run.me, r, numel=n)) for r, n in enumerate(counts)]
    output = run.take(counts[run.me], _reduced(op, run, run.me, numel=counts[run.me]))
    run.call(dist.reduce_scatter, output, inputs, op.reduce_op(run.me))


def _one_of_each(op: Operation, run: Run, j: int, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the input of a reduce_scatter_tensor."""

    def whole(rank: int) -> torch.Tensor:
        return op.part(rank, j, numel=numel * op.size)

    def expected() -> Check:
        return run.reduced([whole(r)[run.me * numel :][:numel] for r in range(op.size)])

    return run.take(numel, expected), run.give(whole(run.me))


def reduce_scatter_tensor(op: Operation, run: Run) -> None:
    run.call(dist.reduce_scatter_tensor, *_one_of_each(op, run, 0, op.numel), op.reduce_op(run.me))


def reduce_scatter_tensor_coalesced(op: Operation, run: Run) -> None:
    pairs = [_one_of_each(op, run, j, n) for j, n in enumerate(op.counts(op.rng()))]
    options = dist.ReduceScatterOptions()
    options.reduceOp = op.reduce_op(run.me)
    outputs, inputs = [o for o, _ in pairs], [i for _, i in pairs]
    run.add(run.group.reduce_scatter_tensor_coalesced(outputs, inputs, options))


def reduce_scatter_tensor_manager(op: Operation, run: Run) -> None:
    reduce_op = op.reduce_op(run.me)
    with dist._coalescing_manager(run.group, async_ops=run.is_async) as manager:
        for j, n in enumerate(op.counts(op.rng())):
            dist.reduce_scatter_tensor(*_one_of_each(op, run, j, n), reduce_op, group=run.group)
    for work in manager.works:
        run.add(work)


class _Sparse:
    """Integers from -3 to 3 in a few places of 40 x 30, which any dtype holds and adds without rounding; in each place
    one of them, or a dense tensor.
    """

    def __init__(self, op: Operation) -> None:
        rng = op.rng()
        self.dtype = rng.choice(SPARSE_DTYPES)
        self.numbers = [rng.choice([0, 1, 7, 900, 5000]) for _ in op.ranks]
        self.dense = rng.choice([(), (), (3,), (2, 1)])
        self.shape = (40, 30, *self.dense)
        self.seed = op.seed

    def _parts(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and values."""
        n = self.numbers[rank]
        sizes = n, n, n * math.prod(self.dense)
        bits = [elements(f"{self.seed} {rank} {what}", size, torch.uint8).long() for what, size in enumerate(sizes)]
        values = (bits[2] % 7 - 3).to(self.dtype).view(n, *self.dense)
        return torch.stack([bits[0] % 40, bits[1] % 30]), values

    def tensor(self, rank: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(*self._parts(rank), self.shape, check_invariants=True)

    def total(self) -> torch.Tensor:
        dense = torch.zeros(self.shape, dtype=torch.int64)
        for rank in range(len(self.numbers)):
            indices, values = self._parts(rank)
            dense.index_put_((indices[0], indices[1]), values.long(), accumulate=True)
        return dense.to(self.dtype)


def sparse_dtype(op: Operation) -> torch.dtype:
    return _Sparse(op).dtype


def sparse_all_reduce(op: Operation, run: Run) -> None:
    drawn = _Sparse(op)
    run.call(dist.all_reduce, run.change_sparse(drawn.tensor(run.me), drawn.total()))


COMBINATIONS = {
    function.__name__: function
    for function in (
        all_reduce, all_reduce_coalesced, all_reduce_manager, reduce, reduce_scatter, reduce_scatter_uneven,
        reduce_scatter_tensor, reduce_scatter_tensor_coalesced, reduce_scatter_tensor_manager, sparse_all_reduce,
    )
}  # fmt: skip
REDUCES_TO_ALL = ["all_reduce", "all_reduce_coalesced", "all_reduce_manager"]
