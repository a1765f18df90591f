"""Data of every dtype, known to all ranks from a seed, and what reductions make of it: on the CPU."""

import torch
import torch.distributed as dist

REDUCED = [
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
MOVED = [*REDUCED, torch.int16, *FLOAT8]
# Of these torch passes complex numbers on as they are, which its NCCL does not take.
_NO_COMPLEX_IN_NCCL = ("reduce", "reduce_scatter", "gather")
SIZES = [1, 1023, 100_001]
AVG = dist.ReduceOp.AVG
OPS = [dist.ReduceOp.SUM, AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]


def part(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact whatever their order."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    if dtype in FLOAT8:
        return torch.randint(0, 120, (numel,), generator=generator, dtype=torch.uint8).view(dtype)
    low, high = (0, 2) if dtype == torch.bool else (-3, 4) if dtype.is_floating_point or dtype.is_complex else (0, 4)
    real = torch.randint(low, high, (numel,), generator=generator)
    if dtype.is_complex:
        return torch.complex(real.double(), torch.randint(low, high, (numel,), generator=generator).double()).to(dtype)
    return real.to(dtype)


def parts(seed: int, ranks: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [part(seed, rank, numel, dtype) for rank in range(ranks)]


def nccl_takes(kind: str, dtype: torch.dtype) -> bool:
    """Is ProcessGroupNCCL there to compare with? What NCCL has no name for it does not even move."""
    return dtype != torch.int16 and not (dtype.is_complex and kind in _NO_COMPLEX_IN_NCCL)


def operations(dtype: torch.dtype) -> list[dist.ReduceOp]:
    """Those that NCCL has for the dtype; torch itself refuses the order of complex numbers, and their product."""
    if dtype.is_complex:
        return OPS[:2]
    return [op for op in OPS if dtype != torch.bool or op != AVG]


def reduced(op: dist.ReduceOp, inputs: list[torch.Tensor]) -> torch.Tensor:
    dtype = inputs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack(inputs).to(wide)
    if op == dist.ReduceOp.SUM:
        result = stacked.sum(0)
    elif op == AVG:
        result = stacked.sum(0) // len(inputs) if wide == torch.int64 else stacked.sum(0) / len(inputs)
    elif op == dist.ReduceOp.PRODUCT:
        result = stacked.prod(0)
    else:
        result = stacked.amin(0) if op == dist.ReduceOp.MIN else stacked.amax(0)
    return result.to(dtype)


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(
        actual.cpu().contiguous().view(torch.uint8), expected.cpu().contiguous().view(torch.uint8)
    )


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """The same bits; a mean of floats over three ranks, which no float holds, within rounding."""
    if not same_bits(actual, expected):
        torch.testing.assert_close(actual.cpu(), expected.cpu(), msg=lambda text: f"{where}: {text}")
