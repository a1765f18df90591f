"""Data for random operations: elements drawn from a seed, and where in memory they lie."""

from __future__ import annotations

import functools
import random

import torch
from torch import Tensor

FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
INTEGERS = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *FP8]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
DTYPES = [*INTEGERS, torch.bool, *FLOATS, *COMPLEX]

_PERIOD = 65_521  # a prime, so that pieces of any size that are swapped do not look alike
_GUARD = 64  # bytes around a tensor that nobody may write to


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements in their logical order, as bytes."""
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


@functools.cache
def _pool(dtype: torch.dtype, has_specials: bool) -> Tensor:
    """The bytes of ``_PERIOD`` elements; integers of full range, with ``has_specials`` also NaN and infinities."""
    generator = torch.Generator().manual_seed(dtype.itemsize)
    if dtype == torch.bool:
        return torch.randint(0, 2, (_PERIOD,), generator=generator, dtype=torch.uint8)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 256, (_PERIOD * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    if dtype.is_complex:
        return bytes_of(torch.view_as_complex(torch.randn(_PERIOD, 2, generator=generator).to(dtype.to_real())))
    values = torch.randn(_PERIOD, generator=generator, dtype=torch.float64)
    if dtype in FP8:
        values = values.clamp(-2, 2)  # what six ranks multiply is still in range
    if has_specials:
        infinity = 2.0 if dtype in FP8 else torch.inf  # of those not all have one
        for step, special in ((101, torch.nan), (103, infinity), (107, -infinity), (109, 0.0), (113, -0.0)):
            values[::step] = special
    return bytes_of(values.to(dtype))


def elements(key: str, numel: int, dtype: torch.dtype, has_specials: bool = False) -> Tensor:
    """``numel`` elements, the same for the same ``key``."""
    start = random.Random(key).randrange(_PERIOD)
    pool, size = _pool(dtype, has_specials), dtype.itemsize
    repeated = pool.repeat(-(-(start + numel) // _PERIOD))
    return repeated[start * size : (start + numel) * size].clone().view(dtype)


class Place:
    """A tensor that lies somewhere in a larger piece of memory, whose rest must stay as it is.

    Args:
        values: what it holds at first, one dimension.
        offset: elements before it, so that it need not be aligned to more than its dtype.
        rows: more than 1: it is the transpose of ``rows`` x n, not contiguous and without gaps.
    """

    def __init__(self, values: Tensor, offset: int = 0, rows: int = 1) -> None:
        size = values.dtype.itemsize
        before = -(-_GUARD // size) + offset
        self._around = torch.full(((before + values.numel()) * size + _GUARD,), 0xA5, dtype=torch.uint8)
        self._inside = slice(before * size, (before + values.numel()) * size)
        whole = self._around[: (before + values.numel()) * size].view(values.dtype)
        flat = whole[before:]
        self.tensor = flat if rows == 1 else flat.view(rows, -1).t()
        # Not every dtype knows how to be copied; its bytes do.
        raw = torch.uint8 if size == 1 else values.dtype
        self.tensor.view(raw).copy_(values.view(raw).view(self.tensor.shape))

    def check_guards(self) -> None:
        before, after = self._around[: self._inside.start], self._around[self._inside.stop :]
        assert bool((before == 0xA5).all() and (after == 0xA5).all()), "memory around a tensor was written to"
