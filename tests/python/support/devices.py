"""Where tests have their models and tensors: on the CPU, or on GPUs.

FARANDOLE_TEST_DEVICE=cuda runs the same tests on GPUs (./dev test-gpu does). Every rank's default device is then its
GPU, which several ranks may share as hosts of their own; gloo's tests run over torch's NCCL.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from farandole.bench._gpus import Placement, why_no_gpu

DEVICE = os.environ.get("FARANDOLE_TEST_DEVICE", "cpu")
if DEVICE not in ("cpu", "cuda"):
    raise ValueError(f"FARANDOLE_TEST_DEVICE is {DEVICE!r}, expected 'cpu' or 'cuda'")
ON_CPU = DEVICE == "cpu"


def only_on_cpu(reason: str) -> pytest.MarkDecorator:
    """For a test, or a module's ``pytestmark``, whose subject is not there on a GPU."""
    return pytest.mark.skipif(not ON_CPU, reason=f"on CPU only: {reason}")


def seeded(seed: int) -> torch.Generator:
    """Of the device that factories use."""
    return torch.Generator(DEVICE).manual_seed(seed)


def backend_for(name: str) -> str:
    """What ``init_process_group`` is told so that tensors on the device are communicated."""
    return "cpu:gloo,cuda:nccl" if name == "gloo" and not ON_CPU else name


def patience(seconds: float) -> float:
    """A limit on ranks' time: seconds go by until each has CUDA and NCCL, and one GPU works for them in turns."""
    return seconds if ON_CPU else 2 * seconds


def entering(world_size: int, enter: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """What a rank does first of all in its process."""
    if ON_CPU:
        return enter
    if reason := why_no_gpu():
        raise RuntimeError(f"FARANDOLE_TEST_DEVICE is {DEVICE!r}: {reason}")
    return functools.partial(_enter, placement=Placement.of(world_size), enter=enter)


def _enter(rank: int, placement: Placement, enter: Callable[[int], None] | None) -> None:
    if enter is not None:
        enter(rank)
    placement.enter(rank)
    torch.set_default_device(DEVICE)
    torch.backends.cudnn.allow_tf32 = False


def on_cpu(result: Any) -> Any:
    """A rank's result for the process that asked for it: memory of a GPU would go with the rank."""
    return result if ON_CPU else tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)
