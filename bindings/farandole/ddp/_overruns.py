"""Gradients that were summed over the ranks, and got more by one rank alone since, in ``no_sync``: the next reduction would
tell all ranks; where the optimizer steps before, it raises."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole.ddp._rewrapping import wrappers


@functools.cache
def refuse_overrun_steps() -> None:
    """From now on, of any optimizer that looks at ``.grad``. What is in ``main_grad`` a DistributedOptimizer takes, which
    asks by itself."""
    register_optimizer_step_pre_hook(_refuse_overrun)


def _refuse_overrun(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or any(closure is not None for closure in (*args[1:], *kwargs.values())):
        return  # a closure may compute the gradients
    for wrapper in wrappers():
        overrun = wrapper._reducer.overrun()
        if not overrun:
            continue
        trained = set(wrapper._trainable.values())
        if any(parameter in trained for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(f"{type(optimizer).__name__}.step(): {overrun}")
