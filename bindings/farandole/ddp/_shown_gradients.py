"""Param groups of a distributed optimizer show parts of gradients, or not all: torch's clipping raises where it cannot be
right."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from farandole.ddp._overflow import owner_of
from farandole.ddp._rewrapping import wrapper_of


class _Piece(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def parameter(self) -> torch.Tensor: ...


class Shows(Protocol):
    """A tensor that is in param groups, for the gradient of a parameter or of neighbours."""

    tensor: torch.nn.Parameter
    is_part: bool  # other ranks have the rest
    is_late: bool  # its gradient comes from other ranks when the optimizer steps

    @property
    def pieces(self) -> Sequence[_Piece]: ...
    @property
    def is_seen_by_scalers(self) -> bool: ...


_shown: weakref.WeakValueDictionary[int, Shows] = weakref.WeakValueDictionary()  # by the ids of tensor and gradient


def note_shown(one: Shows, grads: torch.Tensor) -> None:
    """That it is there; ``grads`` may be its tensor's ``grad``."""
    _shown[id(one.tensor)] = _shown[id(grads)] = one


def checked(what: str, tensors: Iterable[torch.Tensor], expected: str, *, by_norm: bool = True) -> list[torch.Tensor]:
    """What torch may clip of these, parameters or gradients: all but flags, which have no elements.

    Raises:
        RuntimeError: a norm of them would be that of parts, or what is done to them would be done to no gradient.
    """
    clipped = []
    for tensor in tensors:
        is_flag, owner = owner_of(tensor)
        if not is_flag:
            clipped.append(tensor)
        reason = _reason_of_all(owner, by_norm) if is_flag else _reason(tensor, by_norm)
        if reason is not None:
            raise RuntimeError(f"{what}: {reason}: expected {expected}")
    return clipped


def _reason(tensor: torch.Tensor, by_norm: bool) -> str | None:
    one = _shown.get(id(tensor))
    if one is None or (one.tensor is not tensor and one.tensor.grad is not tensor):
        return None
    if one.is_late or (by_norm and one.is_part):
        return _of_a_part(one.pieces[0].name)
    return _of_none(one) if one.tensor.grad is None and _has_gradient(one) else None


def _reason_of_all(optimizer: Any, by_norm: bool) -> str | None:
    """Param groups of a DistributedOptimizer end with a flag, and lack what scalers do not see."""
    if optimizer is None:
        return None
    if by_norm:
        for model in optimizer._models:
            if model._param_sync is not None and max(model.replicas.group.size(), model.experts.group.size()) > 1:
                return _of_a_part(next(iter(model._trainable), ""))
    lacking = (one for one in optimizer._graded if not one.is_seen_by_scalers and _has_gradient(one))
    first = next(lacking, None)
    return None if first is None else _of_none(first)


def _has_gradient(one: Shows) -> bool:
    parameter = one.pieces[0].parameter
    if getattr(parameter, "main_grad_place", "grad") == "grad":
        return parameter.grad is not None
    wrapper, _ = wrapper_of(parameter)
    return wrapper is not None and wrapper._reducer.is_reduced()


def _of_a_part(name: str) -> str:
    return (
        f"of the gradient of parameter '{name}' the param groups of a DistributedOptimizer, and of what it was made of, "
        "have this rank's part, as of all others of its model, and each rank would clip its parts by itself"
    )


def _of_none(one: Shows) -> str:
    return (
        f"the gradient of parameter '{one.pieces[0].name}' is in no .grad of the param groups of a DistributedOptimizer, "
        "which makes a copy of another type when it clips or steps, and this would not be clipped"
    )
