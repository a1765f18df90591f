"""Runs a function on ranks that have a GPU, or share one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.bench._gpus import Placement, why_no_gpu
from support.processes import run_ranks

_reason = why_no_gpu()
needs_gpu = pytest.mark.skipif(_reason is not None, reason=f"needs a GPU: {_reason}")
needs_two_gpus = pytest.mark.skipif(
    _reason is not None or torch.cuda.device_count() < 2, reason=f"needs two GPUs: {_reason or 'there is one'}"
)


def run_on_gpus(fn: Any, placement: Placement, backend: str | None = "farandole", **kwargs: Any) -> list[Any]:
    """``run_ranks``, with each rank on its GPU."""
    return run_ranks(fn, placement.size, backend, **{"timeout": 60.0, "enter": placement.enter} | kwargs)
