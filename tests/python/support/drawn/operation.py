"""One random operation of a group: drawn alike by all of its ranks, started, waited for, and checked."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.drawn.memory import DTYPES, Place, bytes_of, elements
from support.drawn.reductions import PREMUL, PRODUCT, SUM, Check, Exactly, reduce_ops, reduced

# Around a page, the sizes at which data goes another way, and two large ones past the caches.
BYTES = [0, 1, 16, 64, 1000, 4096, 8192, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 704 << 10, 1 << 20]
LARGE_BYTES = [4 << 20, 8 << 20, 16 << 20]
# torch.distributed refuses others before a backend sees them.
COMPLEX_PRODUCTS = [
    "all_reduce_coalesced",
    "reduce_scatter",
    "reduce_scatter_uneven",
    "reduce_scatter_tensor_coalesced",
]
FACTORS = [0.5, -3.0, 1.25, 0.1, 2.0, 0.0]


class Operation:
    """What is drawn of an operation, before anything is done.

    Attributes:
        ranks: of the group, in its order; ``size`` how many.
        unit: elements of which sizes are multiples, for ``rows``.
        factors: of PREMUL_SUM, for each rank.
        in_steps: whether a reduction may round partial results to the dtype.
    """

    def __init__(self, seed: int, kinds: Sequence[str], ranks: Sequence[int], hosts: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.ranks = ranks
        self.size = len(ranks)
        self.kind = rng.choice(kinds)
        self.dtype = rng.choice(DTYPES)
        self.op = rng.choice(reduce_ops(self.dtype))
        if self.dtype.is_complex and self.op == PRODUCT and self.kind not in COMPLEX_PRODUCTS:
            self.op = SUM
        self.root = rng.randrange(self.size)
        self.tag = rng.choice([0, 1, 77, 2**31 - 1])
        self.has_specials = rng.random() < 0.2
        self.is_large = rng.random() < 0.02
        self.offset = rng.choice([0, 0, 1, 3])
        self.rows = rng.choice([1, 1, 1, 2, 5])
        self.factors = [rng.choice(FACTORS) for _ in ranks]
        self.in_steps = hosts > 1
        self.numel = self.count(rng)
        self.rng_seed = rng.random()

    def count(self, rng: random.Random) -> int:
        """A number of elements, of bytes that are at an edge or next to it."""
        edge = rng.choice(LARGE_BYTES if self.is_large else BYTES)
        return max(0, edge // self.dtype.itemsize + rng.choice([-1, 0, 0, 1]))

    def counts(self, rng: random.Random) -> list[int]:
        """One for each rank."""
        if self.is_large:
            return [self.numel // rng.choice([1, 3, 4000]) for _ in self.ranks]
        return [self.count(rng) for _ in self.ranks]

    def rng(self) -> random.Random:
        return random.Random(self.rng_seed)

    def part(self, *who: int, numel: int | None = None) -> Tensor:
        """The elements that are named ``who``: a rank, and what of it."""
        numel = self.numel if numel is None else numel
        return elements(f"{self.seed} {who}", numel, self.dtype, self.has_specials)

    def reduce_op(self, me: int) -> Any:
        return dist._make_nccl_premul_sum(self.factors[me]) if self.op == PREMUL else self.op

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.kind} of {self.numel} x {self.dtype}, {self.op}, root {self.root}, tag {self.tag},"
            f" ranks {list(self.ranks)}, offset {self.offset}, rows {self.rows}"
            f"{', with NaN and infinities' if self.has_specials and self.dtype.is_floating_point else ''}"
        )


class Run:
    """An operation on one group, as rank ``me`` of it.

    Over gloo (``is_plain``) tensors are contiguous and have memory of their own; ``as_bytes`` moves what gloo has no
    dtype for.
    """

    def __init__(
        self, operation: Operation, group: Any, me: int, is_async: bool, is_plain: bool = False, as_bytes: bool = False
    ) -> None:
        self.operation, self.group, self.me, self.is_async = operation, group, me, is_async
        self.is_plain, self.as_bytes = is_plain, as_bytes
        self.works: list[Any] = []
        self._kept: list[tuple[Place, Tensor]] = []
        self._outputs: list[tuple[Place, Callable[[], Check]]] = []
        self._sparse: list[tuple[Tensor, Tensor]] = []
        self._values: list[tuple[Any, Any]] = []

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.add(function(*args, group=self.group, async_op=self.is_async, **kwargs))

    def add(self, work: Any) -> None:
        if work is not None:
            self.works.append(work)

    def _place(self, values: Tensor, may_have_rows: bool) -> Place:
        op = self.operation
        rows = op.rows if may_have_rows and not self.is_plain and values.numel() % op.rows == 0 else 1
        return Place(values, 0 if self.is_plain else op.offset, rows)

    def _seen(self, place: Place) -> Tensor:
        return place.tensor.view(torch.uint8) if self.as_bytes else place.tensor

    def give(self, values: Tensor, rows: bool = False) -> Tensor:
        """A tensor to send, which must stay as it is."""
        place = self._place(values, rows)
        self._kept.append((place, values))
        return self._seen(place)

    def take(self, numel: int, expected: Callable[[], Check], rows: bool = False) -> Tensor:
        """A tensor to write to; ``expected`` is asked when all is done."""
        junk = torch.full((numel * self.operation.dtype.itemsize,), 1, dtype=torch.uint8).view(self.operation.dtype)
        return self.change(junk, expected, rows)

    def change(self, values: Tensor, expected: Callable[[], Check], rows: bool = False) -> Tensor:
        """A tensor that is replaced by what comes out."""
        place = self._place(values, rows)
        self._outputs.append((place, expected))
        return self._seen(place)

    def change_sparse(self, tensor: Tensor, expected: Tensor) -> Tensor:
        """A sparse tensor that is replaced by one that is ``expected`` when it is dense."""
        self._sparse.append((tensor, expected))
        return tensor

    def expect(self, value: Any, expected: Any) -> None:
        """What is no tensor, and equal when all is done."""
        self._values.append((value, expected))

    def reduced(self, parts: Sequence[Tensor]) -> Check:
        # gloo rounds halves at every step.
        op = self.operation
        return reduced(parts, op.op, op.factors, op.in_steps or self.is_plain)

    def wait(self, rng: random.Random) -> None:
        for work in rng.sample(self.works, len(self.works)):
            if not self.is_plain and rng.random() < 0.2:  # gloo's messages are completed by wait() only
                end = time.monotonic() + 60
                while not work.is_completed():
                    assert time.monotonic() < end, f"{self.operation} is not completed when nobody waits for it"
                    time.sleep(0.0005)
            if not self.is_plain and rng.random() < 0.1 and hasattr(work, "get_future"):
                work.get_future().wait()
            else:
                work.wait()

    def check(self) -> None:
        for place, expected in self._outputs:
            expected().check(place.tensor)
            place.check_guards()
        for tensor, dense in self._sparse:
            Exactly(dense.view(-1), by_value=True).check(tensor.to_dense())
        for value, what in self._values:
            assert value == what, f"got {value!r:.200}, expected {what!r:.200}"
        for place, values in self._kept:
            Exactly(values).check(place.tensor)
            place.check_guards()

    def digest(self) -> int:
        """Of the bits of all results."""
        value = 0
        for place, _ in self._outputs:
            value = zlib.crc32(bytes_of(place.tensor).numpy(), value)
        return value
