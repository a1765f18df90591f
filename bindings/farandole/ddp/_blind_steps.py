"""Optimizers of torch's that look for gradients in ``.grad``, where there are none."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole.ddp._rewrapping import wrapped_name_of


@functools.cache
def refuse_blind_steps() -> None:
    """From now on torch's own optimizers raise where they would leave everything as it is, and say nothing.

    Others may read ``main_grad``, as apex's and TransformerEngine's do.
    """
    register_optimizer_step_pre_hook(_refuse_blind_step)


def _refuse_blind_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or not type(optimizer).__module__.startswith("torch.optim."):
        return
    if any(closure is not None for closure in (*args[1:], *kwargs.values())):
        return  # which may compute the gradients
    reduced_elsewhere = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return
            if reduced_elsewhere is None and getattr(parameter, "main_grad_place", "grad") != "grad":
                reduced_elsewhere = parameter
    name = None if reduced_elsewhere is None else wrapped_name_of(reduced_elsewhere)
    if name is not None:
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"{kind}.step(): the gradient of parameter '{name}' is in its main_grad, .grad is None, and so it is with all "
            f"others that this {kind} has, which would change nothing: expected farandole.ddp.DistributedOptimizer("
            f"{kind}(...), model), or .grad set from main_grad"
        )
