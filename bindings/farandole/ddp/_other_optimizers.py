"""Several optimizers over the same models."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from farandole.ddp._runs import MASTERED
from farandole.ddp._wrapper import DistributedDataParallel

if TYPE_CHECKING:
    from farandole.ddp._optimizer import DistributedOptimizer


class OtherOptimizers:
    """Those over the same models. Of the same parameters each may keep float32 copies: a step of one makes the others'
    too old. Gradients of other parameters are theirs, until they begin a step."""

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        models: Sequence[DistributedDataParallel],
        parameters: Iterable[torch.Tensor],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._parameters = set(parameters)
        self._names = {parameter: name for model in models for name, parameter in model._trainable.items()}
        self._copied_too: weakref.WeakKeyDictionary[DistributedOptimizer, str] = weakref.WeakKeyDictionary()
        self._updated_elsewhere: str | None = None  # a parameter whose copy is too old
        for other in {other for model in models for other in model._optimizers}:
            shared = self._parameters & other._others._parameters
            name = next((self._names[one] for one in self._names if one in shared and one.dtype in MASTERED), None)
            if name is not None:
                self._copied_too[other] = other._others._copied_too[optimizer] = name

    def left_to_this(self, model: DistributedDataParallel) -> list[int] | None:
        """Whose gradients this one begins a step with, by index: of its parameters and those that nobody has; None where
        these are all of the model's."""
        others = [other._others._parameters for other in model._optimizers if other is not self._optimizer()]
        theirs = set[torch.Tensor]().union(*others) - self._parameters
        if not theirs:
            return None
        return [index for index, parameter in enumerate(model._trainable.values()) if parameter not in theirs]

    def check(self) -> None:
        if self._updated_elsewhere is not None:
            raise RuntimeError(
                f"step(): parameter '{self._updated_elsewhere}' was updated by another DistributedOptimizer since, and "
                "the float32 copies that this one updates are older: expected reload_model_params() before"
            )

    def are_outdated(self) -> None:
        """This one has updated its parameters."""
        self._updated_elsewhere = None
        for other, name in self._copied_too.items():
            other._others._updated_elsewhere = name

    def is_reloaded(self) -> None:
        self._updated_elsewhere = None
