"""What a reduction must give: integers and extremes exactly, floats within what rounding explains.

Integers are computed by numpy, floats by torch in float64. The bound follows from
the dtype's unit roundoff u: k roundings of partial results, none larger than the
sum S of the absolute values, are off by at most k u / (1 - k u) S.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from support.drawn.memory import FP8, bytes_of
from support.torch_features import epsilon

SUM, PRODUCT, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX
AVG, PREMUL = dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM
BITWISE = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
_EXACT = {
    SUM: np.add, PRODUCT: np.multiply, MIN: np.minimum, MAX: np.maximum,
    BITWISE[0]: np.bitwise_and, BITWISE[1]: np.bitwise_or, BITWISE[2]: np.bitwise_xor,
}  # fmt: skip
_NARROW = [torch.float16, torch.bfloat16, torch.complex32, *FP8]  # accumulated in float


def reduce_ops(dtype: torch.dtype) -> list[dist.ReduceOp.RedOpType]:
    """Those that ``torch.distributed`` and the backend take for a dtype."""
    if dtype == torch.bool:
        return [SUM, PRODUCT, MIN, MAX, *BITWISE]
    if dtype.is_complex:
        return [SUM, AVG, PRODUCT]
    if dtype in FP8:
        return [SUM, PRODUCT, MIN, MAX, AVG]
    if dtype.is_floating_point:
        return [SUM, PRODUCT, MIN, MAX, AVG, PREMUL]
    return [SUM, PRODUCT, MIN, MAX, AVG, *BITWISE]


class Check(Protocol):
    """What a result must be."""

    def check(self, result: Tensor) -> None: ...


@dataclass
class Exactly:
    """Equal values: all bits, but for zeros of both signs and any NaN where ``by_value``."""

    values: Tensor
    by_value: bool = False

    def check(self, result: Tensor) -> None:
        result = result.reshape(-1)
        assert result.dtype == self.values.dtype and result.numel() == self.values.numel()
        if torch.equal(bytes_of(result), bytes_of(self.values)):
            return
        if self.by_value:
            ours, theirs = result.double(), self.values.double()
            same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        else:
            size = result.dtype.itemsize
            same = (bytes_of(result).view(-1, size) == bytes_of(self.values).view(-1, size)).all(1)
        if not same.all():
            _raise_first(~same, result, self.values)


@dataclass
class Within:
    """At most ``bound`` from ``values`` (float64), at each element; NaN and infinities where they are there."""

    values: Tensor
    bound: Tensor

    def check(self, result: Tensor) -> None:
        wide = _wide(result.reshape(-1))
        assert wide.shape == self.values.shape
        near = (wide - self.values).abs() <= self.bound
        same = near | (wide == self.values) | (wide.isnan() & self.values.isnan())
        if not same.all():
            _raise_first(~same, wide, self.values, self.bound)


def _raise_first(wrong: Tensor, result: Tensor, expected: Tensor, bound: Tensor | None = None) -> None:
    where = wrong.nonzero().view(-1)
    at = int(where[0])
    allowed = "" if bound is None else f" within {bound[at].item():.3g}"
    raise AssertionError(
        f"{len(where)} of {wrong.numel()} elements differ, from {at} to {int(where[-1])}: the first is"
        f" {result[at].item()!r}, expected {expected[at].item()!r}{allowed}"
    )


def _wide(values: Tensor) -> Tensor:
    if values.dtype == torch.complex32:
        values = torch.view_as_complex(torch.view_as_real(values).float())
    return values.to(torch.complex128 if values.dtype.is_complex else torch.float64)


def reduced(parts: Sequence[Tensor], op: dist.ReduceOp.RedOpType, factors: Sequence[float], in_steps: bool) -> Check:
    """What ``parts``, one of each rank, are together.

    Args:
        factors: for PREMUL_SUM, what each rank's part is multiplied by first.
        in_steps: partial results may be rounded to the dtype, as between hosts.
    """
    dtype = parts[0].dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        return Exactly(_of_integers(parts, op))
    wide = [_wide(part) for part in parts]
    if op in (MIN, MAX):
        function = torch.minimum if op == MIN else torch.maximum
        return Exactly(functools.reduce(function, wide).to(dtype), by_value=True)
    return _of_floats(wide, dtype, op, factors, in_steps)


def _of_integers(parts: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> Tensor:
    arrays = [part.numpy() for part in parts]
    if op != AVG:
        return torch.tensor(functools.reduce(_EXACT[op], arrays))
    # A sum that wraps, then a division that rounds towards zero.
    total = functools.reduce(np.add, arrays)
    size = total.dtype.type(len(parts))
    quotient = np.floor_divide(total, size)
    return torch.tensor(quotient + ((total < 0) & (quotient * size != total)).astype(total.dtype))


def _of_floats(
    wide: Sequence[Tensor], dtype: torch.dtype, op: dist.ReduceOp.RedOpType, factors: Sequence[float], in_steps: bool
) -> Within:
    real = dtype.to_real()
    u, float_u = epsilon(real) / 2, torch.finfo(torch.float32).eps / 2
    least = torch.finfo(real).smallest_normal * epsilon(real)  # the distance of numbers close to zero
    size = len(wide)
    premultiplied, divided = int(op == PREMUL), int(op == AVG)
    # A factor is rounded to the dtype, and what it gives.
    if in_steps or dtype not in _NARROW:
        in_dtype, in_float = size - 1 + divided + 2 * premultiplied, 0
    else:
        in_dtype, in_float = 1 + 2 * premultiplied, size - 1 + divided
    if op == PREMUL:
        wide = [part * factor for part, factor in zip(wide, factors)]
    if op == PRODUCT:
        values = functools.reduce(torch.mul, wide)
        magnitude = values.abs()
        least_many = functools.reduce(torch.mul, [part.abs().clamp(min=1) for part in wide])
    else:
        values = functools.reduce(torch.add, wide)
        magnitude = functools.reduce(torch.add, [part.abs() for part in wide])
        least_many = torch.ones(())
        if op == AVG:
            values, magnitude = values / size, magnitude / size
    if dtype.is_complex and op == PRODUCT:  # four products and two sums
        in_dtype, in_float = 3 * in_dtype, 3 * in_float
    # The computation here rounds as often in float64.
    roundings = ((in_dtype, u), (in_float, float_u), (size + 1, torch.finfo(torch.float64).eps / 2))
    relative = sum(k * unit / (1 - k * unit) for k, unit in roundings)
    absolute = in_dtype * least * least_many.nan_to_num(1, 1, 1)
    return Within(values, magnitude.nan_to_num(0, 0, 0) * relative + absolute)
