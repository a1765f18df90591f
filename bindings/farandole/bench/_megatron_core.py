"""Megatron-core itself, on CPU: as a peer of the benchmark, and as the oracle of the tests."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch

FOLDER = "FARANDOLE_MEGATRON_CORE"  # the variable that names where another Megatron-core is than the one installed


class _Cuda:
    """torch.cuda for whoever asks it where tensors go."""

    def current_device(self) -> str:
        return "cpu"

    def current_stream(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch:
    """torch, with tensors that are asked for on CUDA made on the CPU."""

    cuda = _Cuda()

    def zeros(self, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, device="cpu" if device == "cuda" else device, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def find() -> None:
    folder = os.environ.get(FOLDER)
    if folder and folder not in sys.path:
        if "megatron.core" in sys.modules:
            raise RuntimeError(f"{FOLDER}={folder}, but another Megatron-core was imported before")
        sys.path.insert(0, folder)


def import_schedules() -> Any:
    """``megatron.core.pipeline_parallel.schedules``, which names CUDA where it makes tensors: told to use the CPU.

    Raises:
        ImportError: Megatron-core is not installed.
    """
    find()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else it would use
        from megatron.core.pipeline_parallel import p2p_communication, schedules
    schedules.torch = p2p_communication.torch = _Torch()
    return schedules


def import_distributed() -> Any:
    """``megatron.core.distributed``, whose buffers are on CUDA: told to make them on the CPU.

    Raises:
        ImportError: Megatron-core is not installed.
    """
    find()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import distributed
        from megatron.core.distributed import param_and_grad_buffer
    param_and_grad_buffer.torch = _Torch()
    return distributed
