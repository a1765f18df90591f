"""Autocast around the forward, and the scaling of gradients."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch


class Precision:
    """
    Args:
        enable_amp: True is autocast to bfloat16, a dtype autocast to it.
        enable_grad_scaling: losses are scaled where autocast is on and the device is CUDA.
    """

    def __init__(self, device: torch.device, enable_amp: bool | torch.dtype, enable_grad_scaling: bool) -> None:
        self._device = device
        self._dtype: torch.dtype | None = None
        if enable_amp is True:
            self._dtype = torch.bfloat16
        elif isinstance(enable_amp, torch.dtype):
            if enable_amp not in (torch.bfloat16, torch.float16):
                raise ValueError(f"enable_amp={enable_amp}: expected a bool, torch.bfloat16 or torch.float16")
            self._dtype = enable_amp
        elif enable_amp is not False:
            raise TypeError(f"enable_amp={enable_amp!r}: expected a bool, torch.bfloat16 or torch.float16")
        self.scaler: Any = None
        if self._dtype is not None and enable_grad_scaling:
            if device.type == "cuda":
                self.scaler = torch.amp.GradScaler("cuda")
            else:
                warnings.warn(f"gradients are not scaled on {device.type}: scaling needs CUDA", stacklevel=4)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def as_now(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """What a forward of this thread would run under, for any thread."""
        kind = self._device.type
        if self._dtype is None and torch.is_autocast_enabled(kind):
            return functools.partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind))
        return self.autocast

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        self.scaler.update()
