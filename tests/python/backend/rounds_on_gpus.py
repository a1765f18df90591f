"""The random operations of support.rounds with their tensors on GPUs, where NCCL does them.

Each tensor lies on the GPU as it does in the CPU's memory, from which it is copied, and to which it comes back to be
checked. NCCL wants its groups used in one order on all ranks: those that are open at the same time are started as they
were drawn, and each rank waits for them in an order of its own.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.data import REDUCED
from support.devices import DEVICE
from support.drawn.combinations import COMBINATIONS, REDUCES_TO_ALL
from support.drawn.memory import Place
from support.drawn.movements import GIVES_ALL_THE_SAME
from support.drawn.operation import Operation, Run
from support.drawn.reductions import AVG, BITWISE, MAX, MIN, PREMUL, PRODUCT, Check, reduced
from support.rounds import START, is_over

KINDS_ON_GPUS = sorted(set(START) - {"any_source"})


class _Place(Place):
    """Has the same memory, guards and all, on the GPU."""

    def __init__(self, values: Tensor, offset: int, rows: int) -> None:
        super().__init__(values, offset, rows)
        self._there = self._around.to(DEVICE)

    @property
    def there(self) -> Tensor:
        whole = self._there[: self._inside.stop].view(self.tensor.dtype)
        return whole.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset())

    def bring_back(self) -> None:
        self._around.copy_(self._there)


class _Run(Run):
    def _place(self, values: Tensor, may_have_rows: bool) -> _Place:
        op = self.operation
        return _Place(values, op.offset, op.rows if may_have_rows and values.numel() % op.rows == 0 else 1)

    def _seen(self, place: Place) -> Tensor:
        assert isinstance(place, _Place)
        return place.there

    def change_sparse(self, tensor: Tensor, expected: Tensor) -> Tensor:
        return super().change_sparse(tensor.to(DEVICE), expected)

    def reduced(self, parts: list[Tensor]) -> Check:
        op, size = self.operation, self.operation.size
        if op.op == AVG and (op.dtype.is_floating_point or op.dtype.is_complex):  # each part is divided first
            return reduced(parts, PREMUL, [1 / size] * size, in_steps=True)
        return reduced(parts, op.op, op.factors, in_steps=True)

    def check(self) -> None:
        for place, _ in [*self._outputs, *self._kept]:
            assert isinstance(place, _Place)
            place.bring_back()
        self._sparse = [(tensor.cpu(), dense) for tensor, dense in self._sparse]
        super().check()


def _takes(op: Operation) -> bool:
    """Does NCCL, and with the result that is expected? It takes numbers for extremes where there are also NaN."""
    if op.kind not in COMBINATIONS or op.kind == "sparse_all_reduce":
        return True
    if op.dtype not in REDUCED or op.op in BITWISE:
        return False
    if op.dtype.is_complex:
        return op.op != PRODUCT
    return not (op.op in (MIN, MAX) and op.has_specials and op.dtype.is_floating_point)


def _operation(seed: int, ranks: list[int]) -> Operation:
    drawn = (Operation(seed + (attempt << 40), KINDS_ON_GPUS, ranks, hosts=len(ranks)) for attempt in itertools.count())
    return next(filter(_takes, drawn))


def _round(seed: int, rank: int, groups: list[tuple[list[int], Any]], kinds: set[str]) -> list[tuple[list[int], int]]:
    """For each operation its ranks, and the digest of what it gave this one, 0 where that differs between them."""
    rng = random.Random(seed)
    own = random.Random(f"{seed} {rank}")
    chosen = [rng.choice(groups) for _ in range(rng.randrange(2, 6) if rng.random() < 0.5 else 1)]
    drawn = [(_operation(seed * 8 + index, ranks), group) for index, (ranks, group) in enumerate(chosen)]
    is_async = len(drawn) > 1 or rng.random() < 0.5
    runs: list[_Run] = []
    try:
        for op, group in drawn:
            kinds.add(op.kind)
            if rank in op.ranks:
                runs.append(_Run(op, group, op.ranks.index(rank), is_async))
                start: Callable[[Operation, Run], None] = START[op.kind]
                start(op, runs[-1])
        for run in own.sample(runs, len(runs)):
            run.wait(own)
        for run in runs:
            run.check()
    except Exception as error:
        raise AssertionError(f"round {seed}: {'; '.join(str(op) for op, _ in drawn)}: {error}") from error
    digests = {run.operation.seed: run.digest() for run in runs}
    same = GIVES_ALL_THE_SAME + REDUCES_TO_ALL
    return [(list(op.ranks), digests.get(op.seed, 0) if op.kind in same else 0) for op, _ in drawn]


def run_rounds_on_gpus(rank: int, world_size: int, first_seed: int, seconds: float) -> tuple[int, list[str]]:
    """As run_rounds: for ``seconds``, which may be infinite; how many, and the kinds that were drawn."""
    torch.set_default_device("cpu")  # where all is drawn and checked
    everybody = list(range(world_size))
    shapes = [everybody, everybody, everybody[1:], [world_size - 1], [0, 1]]
    groups = [(ranks, dist.new_group(ranks)) for ranks in shapes]
    kinds: set[str] = set()
    seed, end = first_seed, time.monotonic() + seconds
    while True:
        if (seed - first_seed) % 20 == 0 and is_over(end):
            return seed - first_seed, sorted(kinds)
        outcomes: list[Any] = [None] * world_size
        dist.all_gather_object(outcomes, _round(seed, rank, groups, kinds))
        for index, (ranks, _) in enumerate(outcomes[0]):
            digests = {outcomes[r][index][1] for r in ranks}
            assert len(digests) == 1, f"round {seed}, operation {index}: ranks {ranks} have different bits"
        seed += 1
