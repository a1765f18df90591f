"""Copies and pickles of a wrapped module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from farandole import _C
from farandole.ddp._options import Replicas

if TYPE_CHECKING:
    from farandole.ddp._wrapper import DistributedDataParallel

_MADE_AGAIN = (
    *("process_group", "replicas", "experts", "_reducer", "_trainable", "_param_sync", "_options", "_is_added"),
    *("_tuner", "_timeline", "_watch", "_shared_buffers", "_optimizers"),
)
_KEPT = ("require_backward_grad_sync", "require_forward_param_sync")


class HookOfOne:
    """A hook that belongs to one module: in a copy of that module it does nothing."""

    def __init__(self, hook: Callable[..., Any] | None) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._hook is None else self._hook(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> HookOfOne:
        return HookOfOne(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return HookOfOne, (None,)


def state_of(model: DistributedDataParallel) -> dict[str, Any]:
    """All but what belongs to this process; a RuntimeError where that is not the default group alone."""
    replicas = (model.replicas, model.experts)
    if any(of.group != dist.group.WORLD or of.instances is not None for of in replicas):
        raise RuntimeError(
            f"copying or pickling a {type(model).__name__}: expected one over the default process group alone; "
            "copy its module and wrap the copy"
        )
    if model._param_sync is not None:
        model._param_sync.finish()
    state = {name: value for name, value in model.__dict__.items() if name not in _MADE_AGAIN}
    state["_options"] = {name: getattr(model._options, name) for name in _option_names()}
    return state


def build_again(model: DistributedDataParallel, state: dict[str, Any]) -> None:
    """The rest, over the default group. No collective: what was agreed on holds for copies."""
    if dist.group.WORLD is None:
        raise RuntimeError(f"unpickling a {type(model).__name__}: expected init_process_group to have been called")
    values = state.pop("_options")
    torch.nn.Module.__setstate__(model, state)
    options = _C.ReducerOptions()
    for name, value in values.items():
        setattr(options, name, value)
    options.is_agreed = True
    kept = {name: state[name] for name in _KEPT}
    replicas = Replicas(dist.group.WORLD)
    model._build(model.module, replicas, replicas, options, state["_overlap_param_gather"])
    model.__dict__.update(kept)


def _option_names() -> list[str]:
    return [name for name, value in vars(_C.ReducerOptions).items() if isinstance(value, property)]
