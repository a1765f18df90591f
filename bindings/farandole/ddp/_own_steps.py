"""An optimizer that a distributed one was made of: that one steps it, and nobody else."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

_now = threading.local()  # whose step this thread makes, for the one that holds it
_holders: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[torch.optim.Optimizer]] = (
    weakref.WeakKeyDictionary()
)


def hold(optimizer: torch.optim.Optimizer, holder: torch.optim.Optimizer) -> None:
    """From now on its steps are the holder's, for as long as there is that one."""
    is_first = optimizer not in _holders
    _holders[optimizer] = weakref.ref(holder)
    if is_first and hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    ):  # what stands for others may not have torch's constructor
        optimizer.register_step_pre_hook(refuse_others_step)


def step_held(optimizer: torch.optim.Optimizer) -> None:
    """A step for the holder."""
    before = getattr(_now, "stepped", None)
    _now.stepped = optimizer
    try:
        optimizer.step()
    finally:
        _now.stepped = before


def refuse_others_step(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """A hook: raises before a step of one that is held, but for the holder's."""
    if torch.compiler.is_compiling() or getattr(_now, "stepped", None) is optimizer:
        return
    holder = _holders.get(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    if holder is not None and holder() is not None:
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"{kind}.step(): a farandole.ddp.DistributedOptimizer was made of this {kind}, which has that one's tensors "
            "now: a step of its own would take gradients that are not ready, and leave other ranks without what it has "
            "updated: expected step() of the DistributedOptimizer, and that one for a GradScaler, too"
        )
