"""What is done to gradients between backward and step."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from farandole import _C
from farandole.ddp._fused import reset_added

if TYPE_CHECKING:
    from farandole.ddp._optimizer import DistributedOptimizer


class HoldsGradients(torch.nn.Module):
    """The part of the wrapper that changes reduced gradients."""

    _options: _C.ReducerOptions
    _reducer: _C.GradReducer
    _trainable: dict[str, torch.nn.Parameter]
    module: torch.nn.Module
    _is_added: Callable[[int], bool] | None
    _optimizers: weakref.WeakSet[DistributedOptimizer]  # that may have copies of gradients

    def zero_grad_buffer(self) -> None:
        """Zeroes every ``main_grad``, and with it every ``.grad`` that is one, by one kernel per buffer."""
        self._reset_added()
        self._reducer.zero_grads()

    def _reset_added(self) -> None:
        if self._is_added is not None:
            reset_added(self._trainable.values())

    def forget_grads(self) -> None:
        """What ``main_grad`` holds does not count any more, and the next gradient replaces it; ``.grad`` is None.

        It spares the pass over the buffers that :meth:`zero_grad_buffer` makes. Between the two ``main_grad`` must not
        be read. Where kernels add to ``main_grad`` themselves it is zeroed.
        """
        if self._is_added is not None:
            self.zero_grad_buffer()
        else:
            self._reducer.forget_grads()

    def _begin_grads(self, indices: list[int] | None, set_to_none: bool) -> None:
        """Of the trainable parameters with these indices, or all: :meth:`forget_grads`, or zeroes them."""
        if not set_to_none:
            self._zero_grads_elsewhere(indices)
        if indices is None:
            self.forget_grads() if set_to_none else self.zero_grad_buffer()
            return
        if self._is_added is not None:
            trainable = list(self._trainable.values())
            reset_added([trainable[index] for index in indices])
        self._reducer.forget_some_grads(indices, zeroes=not set_to_none or self._is_added is not None)

    @torch.no_grad()
    def _zero_grads_elsewhere(self, indices: list[int] | None) -> None:
        """What is in ``.grad`` from before the model was wrapped, or was put there since, and is not in ``main_grad``."""
        trainable = list(self._trainable.values())
        for parameter in trainable if indices is None else [trainable[index] for index in indices]:
            if parameter.grad is not None and parameter.grad.data_ptr() != parameter.main_grad.data_ptr():
                parameter.grad.detach().zero_()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, also where gradients are in ``main_grad``: then by :meth:`forget_grads` or :meth:`zero_grad_buffer`."""
        torch.nn.Module.zero_grad(self.module, set_to_none)
        if self._options.home == _C.GradHome.main_grad:
            self.forget_grads() if set_to_none else self.zero_grad_buffer()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies every ``main_grad``: e.g. by one over the number of tokens. A tensor has one element."""
        if isinstance(scaling_factor, torch.Tensor) and scaling_factor.numel() == 1:
            scaling_factor = scaling_factor.item()
        if not isinstance(scaling_factor, numbers.Real):
            raise TypeError(f"scaling_factor={scaling_factor!r}: expected a number")
        self._reducer.scale_grads(float(scaling_factor))
        self._scale_copies(scaling_factor)

    @torch.no_grad()
    def _scale_copies(self, factor: float | torch.Tensor) -> None:
        for optimizer in self._optimizers:
            optimizer._scale_copies(self, factor)
