"""Optimizers of torch's that look for gradients in ``.grad``, where there are none."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole.ddp._rewrapping import wrapper_of

_wrapped = 0  # how often a model was wrapped whose gradients are in main_grad
_reduced: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[int, int], list[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)  # what of an optimizer's parameters is reduced there, as of then


def refuse_blind_steps() -> None:
    """From now on torch's own optimizers raise where they would leave a model that is wrapped as it is, and say nothing.

    Others may read ``main_grad``, as apex's and TransformerEngine's do.
    """
    global _wrapped
    _wrapped += 1
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_refuse_blind_step)


def _refuse_blind_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or not type(optimizer).__module__.startswith("torch.optim."):
        return
    if any(closure is not None for closure in (*args[1:], *kwargs.values())):
        return  # which may compute the gradients
    reduced = _reduced_elsewhere(optimizer)
    if not reduced or any(parameter.grad is not None for parameter in reduced):
        return
    first = next((parameter for parameter in reduced if parameter.requires_grad), None)
    wrapper, name = (None, "") if first is None else wrapper_of(first)
    if wrapper is not None and wrapper._reducer.is_reduced():
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"{kind}.step(): the gradient of parameter '{name}' is in its main_grad, .grad is None, and so it is with all "
            f"others of its model, which this {kind} would leave as they are: expected farandole.ddp.DistributedOptimizer("
            f"{kind}(...), model), or .grad set from main_grad"
        )


def _reduced_elsewhere(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    now = _wrapped, sum(len(group["params"]) for group in optimizer.param_groups)
    known = _reduced.get(optimizer)
    if known is None or known[0] != now:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        known = now, [one for one in parameters if getattr(one, "main_grad_place", "grad") != "grad"]
        _reduced[optimizer] = known
    return known[1]
