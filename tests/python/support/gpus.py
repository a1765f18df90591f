"""Runs a function on ranks that have a GPU, or share one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole.bench._gpus import Placement, sharing_placements, spread, why_no_gpu
from support.processes import RankFailed, run_ranks

_reason = why_no_gpu()
needs_gpu = pytest.mark.skipif(_reason is not None, reason=f"needs a GPU: {_reason}")
needs_two_gpus = pytest.mark.skipif(
    _reason is not None or torch.cuda.device_count() < 2, reason=f"needs two GPUs: {_reason or 'there is one'}"
)


def run_on_gpus(fn: Any, placement: Placement, backend: str | None = "farandole", **kwargs: Any) -> list[Any]:
    """``run_ranks``, with each rank on its GPU."""
    return run_ranks(fn, placement.size, backend, **{"timeout": 120.0, "enter": placement.enter} | kwargs)


def _sum(rank: int, world_size: int) -> None:
    total = torch.ones(1000, device="cuda")
    dist.all_reduce(total)
    assert torch.equal(total, torch.full_like(total, world_size))


@functools.cache
def several_ranks() -> Placement | str:
    """Where several ranks run: on a GPU each, else on one that torch's own NCCL has shown to be shareable; or why not."""
    if (placement := spread()) is not None:
        return placement
    refused = []
    for candidate in sharing_placements():
        try:
            run_on_gpus(_sum, candidate, "nccl", timeout=60.0)
        except RankFailed as error:
            refused.append(f"{candidate}: {str(error).strip().splitlines()[-1]}")
        else:
            return candidate
    return "one GPU, which NCCL does not let two ranks share: " + "; ".join(refused)
