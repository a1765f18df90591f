"""Autocast around the forward, and the scaling of gradients."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole.sparse._arguments import refuse_no_bool
from farandole.sparse._contexts import NOTHING


class Precision:
    """
    Args:
        enable_amp: True is autocast to bfloat16, a dtype autocast to it.
        enable_grad_scaling: losses are scaled where autocast is on and the device is CUDA.
        scaler: scales on any device, with or without autocast.
        group: the ranks that skip a step together where the gradients of one have overflowed.
    """

    def __init__(
        self,
        device: torch.device,
        enable_amp: bool | torch.dtype,
        enable_grad_scaling: bool,
        scaler: torch.amp.GradScaler | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        refuse_no_bool("enable_grad_scaling", enable_grad_scaling)
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
        self.autocast: Callable[[], contextlib.AbstractContextManager[Any]] = NOTHING  # around the forward
        if self._dtype is not None:
            self.autocast = functools.partial(torch.autocast, device.type, dtype=self._dtype)
        self._group = group
        self.scaler: Any = None
        if scaler is not None:
            self.scaler = _checked(scaler, enable_grad_scaling)
        elif self._dtype is not None and enable_grad_scaling:
            if device.type == "cuda":
                self.scaler = torch.amp.GradScaler("cuda")
            else:
                warnings.warn(f"gradients are not scaled on {device.type}: scaling needs CUDA", stacklevel=4)

    def refuse_fused(self, model: nn.Module) -> None:
        """
        Raises:
            ValueError: losses are scaled, and the model has an optimizer that is fused into the backward.
        """
        fused = None if self.scaler is None else _name_of_fused(model)
        if fused is not None:
            raise ValueError(
                "losses are scaled: an optimizer that is fused into the backward would take scaled gradients "
                f"(that of {fused or 'the model itself'}); pass enable_grad_scaling=False and no grad_scaler, or do not "
                "fuse it"
            )

    def as_now(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """What a forward of this thread would run under, for any thread."""
        kind = self._device.type
        if self._dtype is None and torch.is_autocast_enabled(kind):
            return functools.partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind))
        return self.autocast

    def scaled(self, losses: torch.Tensor) -> torch.Tensor:
        """As they are; where they are to be scaled their sum, as in a plain loop."""
        return losses if self.scaler is None else self.scaler.scale(torch.sum(losses, dim=0))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.unscale_(optimizer)
        self._share_overflow(optimizer)
        try:
            self.scaler.step(optimizer)
        finally:
            self.scaler.update()

    # Each rank has looked at its own gradients, of which those of sharded tables are no other's.
    def _share_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        if self._group is None or self._group.size() == 1:
            return
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        worst = torch.zeros((), device=self._device)
        for value in found.values():
            worst = torch.maximum(worst, value.to(self._device).reshape(()))
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group)
        for value in found.values():
            value.copy_(worst)
        if not found:  # no gradients
            found[self._device] = worst


def _checked(scaler: Any, enable_grad_scaling: bool) -> torch.amp.GradScaler | None:
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"grad_scaler={scaler!r}: expected a torch.amp.GradScaler, or None")
    if not enable_grad_scaling:
        raise ValueError("enable_grad_scaling=False with a grad_scaler: expected one of them")
    return scaler if scaler.is_enabled() else None


def _name_of_fused(model: nn.Module) -> str | None:
    """The first module that has such an optimizer, which torchrec's sharded modules have also in other wrappers."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "fused_optimizer", None), "params", None):
            return name
    return None
