"""What several classes ask of their arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def device_of(device: Any) -> torch.device:
    """
    Raises:
        TypeError, ValueError: it names none.
    """
    try:
        return torch.device(device)
    except TypeError as error:
        raise TypeError(f"device={device!r}: expected a torch.device, or its name") from error
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: expected a torch.device, or its name: {error}") from error


def refuse_no_bool(name: str, value: Any, besides: str = "") -> None:
    """
    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected a bool{besides}")


def group_of(given: Any) -> dist.ProcessGroup | None:
    """The process group of an argument: all ranks for None, where there are others.

    Raises:
        TypeError, ValueError: it is none, or this rank is not in it.
    """
    if given is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    # What new_group() returns to ranks that it leaves out, which is no group, but an int.
    if type(given) is type(dist.GroupMember.NON_GROUP_MEMBER) and given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group is GroupMember.NON_GROUP_MEMBER: this rank is not in the group that new_group() was called for; "
            "expected pipelines on its ranks alone, or a group with this rank"
        )
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(f"process_group={given!r}: expected a torch.distributed.ProcessGroup, or None")
    return given


def refuse_no_window(grad_accum: Any) -> None:
    """
    Raises:
        TypeError, ValueError: neither a number of batches nor None.
    """
    if grad_accum is not None and (isinstance(grad_accum, bool) or not isinstance(grad_accum, int)):
        raise TypeError(f"grad_accum={grad_accum!r}: expected an int above 0, or None")
    if grad_accum is not None and grad_accum < 1:
        raise ValueError(f"grad_accum={grad_accum}: expected an int above 0, or None")


def refuse_no_example(batch: Any, tracing: str | None) -> None:
    """
    Raises:
        TypeError, ValueError: it tells torch.fx nothing.
    """
    if batch is None:
        return
    if not callable(getattr(batch, "to_proxy", None)):
        raise TypeError(
            f"example_batch is a {type(batch).__name__}: expected a batch with to_proxy(), which returns it with "
            "torch.fx.PH in the place of all that varies"
        )
    if tracing == "hooks":
        raise ValueError('example_batch with tracing="hooks": expected None, hooks see the first batch')


def refuse_no_optimizer(optimizer: Any) -> None:
    """
    Raises:
        TypeError: it has no steps.
    """
    if not (callable(getattr(optimizer, "step", None)) and callable(getattr(optimizer, "zero_grad", None))):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: expected a torch.optim.Optimizer")


def refuse_others_optimizer(model: nn.Module, optimizer: Any) -> None:
    """One without parameters is none's; ours, and some others, step copies in float32 or flat ones, which tell nothing.

    Raises:
        ValueError: it has parameters, and none is the model's.
    """
    if type(optimizer).__module__.startswith("farandole."):
        return
    stepped = [part for group in getattr(optimizer, "param_groups", ()) for part in group["params"]]
    own = set(map(id, model.parameters()))
    if stepped and all(type(part) is nn.Parameter and id(part) not in own for part in stepped):
        raise ValueError(
            f"optimizer ({type(optimizer).__name__}) has no parameter of this {type(model).__name__}: expected one of "
            "the model's own, or one without parameters"
        )
