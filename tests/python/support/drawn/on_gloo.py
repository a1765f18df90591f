"""What gloo can of the operations that are drawn: each kind was tried with each dtype, with torch 2.11 and 2.15."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from support.drawn.blocking import BLOCKING
from support.drawn.combinations import COMBINATIONS, sparse_dtype
from support.drawn.memory import COMPLEX
from support.drawn.messages import MESSAGES, has_own
from support.drawn.operation import Operation
from support.drawn.reductions import AVG, MAX, MIN, PREMUL, SUM

_DTYPES = [
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
]  # fmt: skip
# What torch.distributed does not hand on as real numbers.
_REAL_ONLY = ["gather", "all_gather_coalesced", "all_gather_tensor_coalesced", "broadcast_coalesced"]
_CANNOT = ["all_gather_uneven", "all_to_all", "gather_tensor"]


@functools.cache
def _exchanges_lists(gloo: Any) -> bool:
    """Torch 2.11 has no all_to_all of lists over gloo, which its caller is told before anything is sent."""
    tensors = [torch.zeros(0) for _ in range(gloo.size())]
    try:
        dist.all_to_all([torch.zeros(0) for _ in tensors], tensors, group=gloo)
    except RuntimeError as error:
        if "does not support alltoall" not in str(error):
            raise
        return False
    return True


def gloo_can(op: Operation, gloo: Any) -> bool:
    """Whether that group of gloo's does; asked by all of its ranks."""
    if op.kind in _CANNOT or (op.kind == "all_to_all_even" and not _exchanges_lists(gloo)):
        return False
    if op.kind in MESSAGES:
        return not has_own(op) and (op.numel > 0 or op.kind != "any_source")
    if op.kind == "sparse_all_reduce":  # torch adds no sparse halves or bools
        return sparse_dtype(op) in set(_DTYPES) - {torch.float16, torch.bool}
    if op.kind in COMBINATIONS:
        return _can_reduce(op)
    return True


def as_bytes(op: Operation) -> bool:
    """Whether gloo has no dtype for what only moves."""
    if op.kind in COMBINATIONS or op.kind in MESSAGES or (op.kind in BLOCKING and op.kind != "broadcast_coalesced"):
        return False
    return op.dtype not in _DTYPES and (op.dtype not in COMPLEX or op.kind in _REAL_ONLY)


def _can_reduce(op: Operation) -> bool:
    if op.dtype in COMPLEX:
        # torch divides no complex halves on the CPU, but the real numbers that it may hand on instead.
        divides = op.dtype != torch.complex32 or op.kind in ("all_reduce", "all_reduce_manager")
        return op.op == SUM or (op.op == AVG and divides)
    if op.dtype not in _DTYPES or op.op == PREMUL:
        return False
    if op.dtype == torch.bool:
        return op.op != SUM  # it leaves a 2 there
    if op.op == AVG:
        return op.dtype.is_floating_point
    # A NaN is no number to its extremes.
    return not (op.op in (MIN, MAX) and op.has_specials and op.dtype.is_floating_point)
