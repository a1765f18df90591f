"""What of torch's looks for gradients in ``.grad``, where there are none: it raises where it would do nothing, silently."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole.ddp._rewrapping import wrapper_of

_wrapped = 0  # how often a model was wrapped whose gradients are in main_grad
_reduced: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[int, int], list[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)  # what of an optimizer's parameters is reduced there, as of then


def tell_where_grads_are() -> None:
    """From now on torch's own optimizers and clip_grad_norm_ raise where they would leave a model that is wrapped, or its
    gradients, as they are.

    Other optimizers may read ``main_grad``, as apex's and TransformerEngine's do.
    """
    global _wrapped
    _wrapped += 1
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_refuse_blind_step)
    # Nothing hooks into clip_grad_norm_, which programs have bound to names of their own; it looks this one up.
    refusing = _refusing_blind_clips(clip_grad._clip_grads_with_norm_)
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = refusing


def _refusing_blind_clips(clip: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(clip)
    def clip_grads_with_norm_(parameters: Any, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            name = _blind_to(_reduced_in_main_grad(parameters))
            if name is not None:
                raise RuntimeError(
                    f"clip_grad_norm_: the gradient of parameter '{name}' is in its main_grad, .grad is None, and so it is "
                    "with all others of its model, which would not be clipped: expected clip_grad_norm_() of "
                    "farandole.ddp.DistributedOptimizer"
                )
        clip(parameters, *args, **kwargs)

    return clip_grads_with_norm_


def _refuse_blind_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or not type(optimizer).__module__.startswith("torch.optim."):
        return
    if any(closure is not None for closure in (*args[1:], *kwargs.values())):
        return  # which may compute the gradients
    name = _blind_to(_reduced_elsewhere(optimizer))
    if name is not None:
        kind = type(optimizer).__name__
        raise RuntimeError(
            f"{kind}.step(): the gradient of parameter '{name}' is in its main_grad, .grad is None, and so it is with all "
            f"others of its model, which this {kind} would leave as they are: expected farandole.ddp.DistributedOptimizer("
            f"{kind}(...), model), or .grad set from main_grad"
        )


def _blind_to(reduced: list[torch.Tensor]) -> str | None:
    """The name of one with a gradient that nobody sees who looks at ``.grad``."""
    if not reduced or any(parameter.grad is not None for parameter in reduced):
        return None
    first = next((parameter for parameter in reduced if parameter.requires_grad), None)
    wrapper, name = (None, "") if first is None else wrapper_of(first)
    return name if wrapper is not None and wrapper._reducer.is_reduced() else None


def _reduced_in_main_grad(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [one for one in parameters if getattr(one, "main_grad_place", "grad") != "grad"]


def _reduced_elsewhere(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    now = _wrapped, sum(len(group["params"]) for group in optimizer.param_groups)
    known = _reduced.get(optimizer)
    if known is None or known[0] != now:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        known = now, _reduced_in_main_grad(parameters)
        _reduced[optimizer] = known
    return known[1]
