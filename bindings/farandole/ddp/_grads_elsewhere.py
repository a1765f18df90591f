"""What of torch's looks for gradients in ``.grad``, where there are none: it raises where it would do nothing, silently."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farandole.ddp._own_steps import refuse_others_step
from farandole.ddp._rewrapping import wrapper_of
from farandole.ddp._shown_gradients import checked

_CLIPPED = "clip_grad_norm_() of farandole.ddp.DistributedOptimizer"
_CLAMPED = "parameter.main_grad.clamp_(-clip_value, clip_value) of each, before the optimizer clips or steps"
_wrapped = 0  # how often a model was wrapped whose gradients are in main_grad
_reduced: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[int, int], list[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)  # what of an optimizer's parameters is reduced there, as of then


def tell_where_grads_are() -> None:
    """From now on torch's own optimizers, also by a GradScaler, clip_grad_norm_ and clip_grad_value_ raise where they would
    leave a model that is wrapped, or its gradients, as they are.

    Other optimizers may read ``main_grad``, as apex's and TransformerEngine's do.
    """
    global _wrapped
    _wrapped += 1
    look_for_blind_calls()


@functools.cache
def look_for_blind_calls() -> None:
    register_optimizer_step_pre_hook(_refuse_blind_step)
    # Nothing hooks into clip_grad_norm_, which programs have bound to names of their own; it looks this one up.
    refusing = _refusing_blind_clips(clip_grad._clip_grads_with_norm_)
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = refusing
    torch.nn.utils.get_total_norm = _refusing_norms_of_parts(clip_grad._get_total_norm, "get_total_norm")
    clip_grad._get_total_norm = _refusing_norms_of_parts(clip_grad._get_total_norm, "clip_grad_norm_")
    refusing = _refusing_blind_clips(clip_grad.clip_grad_value_, "clip_grad_value_", _CLAMPED, by_norm=False)
    clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = refusing
    clip_grad._group_tensors_by_device_and_dtype = _refusing_nothing(clip_grad._group_tensors_by_device_and_dtype)
    torch.amp.GradScaler.step = _refusing_blind_steps(torch.amp.GradScaler.step)


def _refusing_blind_clips(
    clip: Callable[..., None],
    what: str = "clip_grad_norm_",
    expected: str = _CLIPPED,
    *,
    by_norm: bool = True,
) -> Callable[..., None]:
    @functools.wraps(clip)
    def clip_grads(parameters: Any, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            parameters = checked(what, parameters, expected, by_norm=by_norm)
            name = _blind_to(_reduced_in_main_grad(parameters))
            if name is not None:
                raise RuntimeError(
                    f"{what}: the gradient of parameter '{name}' is in its main_grad, .grad is None, and so it is with all "
                    f"others of its model, which would not be clipped: expected {expected}"
                )
        clip(parameters, *args, **kwargs)

    return clip_grads


def _refusing_norms_of_parts(get_total_norm: Callable[..., torch.Tensor], what: str) -> Callable[..., torch.Tensor]:
    """Of gradients, not of parameters."""

    @functools.wraps(get_total_norm)
    def total_norm(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            tensors = checked(what, [tensors] if isinstance(tensors, torch.Tensor) else tensors, _CLIPPED)
        return get_total_norm(tensors, *args, **kwargs)

    return total_norm


def _refusing_nothing(group: Callable[..., Any]) -> Callable[..., Any]:
    """For a clip_grad_value_ that a program has bound to a name of its own, which looks this up, and fails without a word
    where it is given nothing."""

    @functools.wraps(group)
    def group_tensors(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not any(tensors):
            raise RuntimeError(
                "clip_grad_value_: no parameter has a .grad. Where gradients are in main_grad "
                f"(use_distributed_optimizer, grad_reduce_in_fp32): expected {_CLAMPED}"
            )
        return group(tensors, *args, **kwargs)

    return group_tensors


def _refusing_blind_steps(step: Callable[..., Any]) -> Callable[..., Any]:
    """A scaler's, which finds no gradients before the optimizer does."""

    @functools.wraps(step)
    def step_optimizer(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        refuse_others_step(optimizer)
        _refuse_blind_step(optimizer, (optimizer, *args), kwargs)
        return step(scaler, optimizer, *args, **kwargs)

    return step_optimizer


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
