"""A model chunk as a stage of the executor: its forward step, and what is done around its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from farandole.megatron._config import StepConfig
from farandole.megatron._losses import Collected, set_auxiliary_loss_scales, take_loss
from farandole.megatron._models import get_attr_wrapped_model, set_current_microbatch
from farandole.megatron._sync import StepSync
from farandole.megatron._timing import timed
from farandole.megatron._topology import set_virtual_rank


@dataclass
class Call:
    """What one call of a forward-backward function was given, and what it collects."""

    forward_step_func: Callable[..., Any]
    iterators: list[Any]  # by chunk
    models: list[nn.Module]  # by chunk
    config: StepConfig
    sync: StepSync
    collected: Collected
    num_microbatches: int
    cp_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    max_outstanding: int | None  # microbatches after which the choice of what to checkpoint repeats; None: no choice
    device: torch.device
    is_backward_timed: bool = False

    def checkpoint_argument(self) -> tuple[bool, ...]:
        """The third argument of the forward step, where the config asks for one (Korthikanti et al. 2022, appendix C)."""
        if self.max_outstanding is None:
            return ()
        limit = self.config.num_microbatches_with_partial_activation_checkpoints
        return (self.sync.forwards_begun % self.max_outstanding >= limit,)

    def start_backward_timer(self) -> None:
        if self.config.timers is not None:
            self.config.timers("backward-compute", log_level=2).start()
            self.is_backward_timed = True

    def stop_backward_timer(self) -> None:
        if self.is_backward_timed:
            self.config.timers("backward-compute").stop()
            self.is_backward_timed = False


class Chunk:
    """Stands for one chunk in every call; which models and functions these bring, it learns from the call.

    Args:
        number: among the rank's chunks.
        is_virtual: there are several on each rank.
        is_last: it computes the loss.
        relays: it hands its last input on behind its output, as decoder stages do with what the encoder made.
    """

    def __init__(self, number: int, *, is_virtual: bool, is_last: bool, relays: bool):
        self._number = number
        self._is_virtual = is_virtual
        self._is_last = is_last
        self._relays = relays
        self.call: Call | None = None

    def __call__(self, *inputs: torch.Tensor, microbatch: int) -> Any:
        """The forward step of a microbatch: a tuple of tensors for the next stage, or the loss."""
        call = self._current()
        model, config = call.models[self._number], call.config
        self._enter()
        checkpoint = call.checkpoint_argument()
        call.sync.before_forward()
        with timed(config, "forward-compute", 2):
            self._announce(model, microbatch)
            get_attr_wrapped_model(model, "set_input_tensor")(list(inputs) if inputs else [None])
            with _autocast(config, call.device):
                returned = call.forward_step_func(call.iterators[self._number], model, *checkpoint)
            if not isinstance(returned, (tuple, list)) or len(returned) != 2:
                raise TypeError(
                    f"forward_step_func returned a {type(returned).__name__}, expected (output_tensor, loss_func)"
                )
            output, loss_func = returned
            if self._is_last:
                output = take_loss(
                    output,
                    loss_func,
                    config,
                    call.collected,
                    call.num_microbatches,
                    call.cp_size,
                    call.collect_non_loss_data,
                )
        set_auxiliary_loss_scales(config, call.num_microbatches, call.cp_size, call.device)
        if not self._is_last:
            return self._sent(output, inputs)
        if call.forward_only:
            return None
        return _differentiable(output if config.grad_scale_func is None else config.grad_scale_func(output))

    def around_backward(self, microbatch: int, begins: bool) -> None:
        call = self._current()
        if begins:
            self._enter()
            call.sync.before_backward()
            call.start_backward_timer()
        else:
            call.stop_backward_timer()
            call.sync.after_backward()

    def require_grad_sync(self, required: bool) -> None:
        self._current().sync.require(self._number, required)

    def finish_grad_sync(self) -> None:
        self._current().sync.finish(self._number)

    def abandon_grad_sync(self, reason: str) -> None:
        self._current().sync.abandon(self._number, reason)

    def _current(self) -> Call:
        assert self.call is not None
        return self.call

    def _enter(self) -> None:
        if self._is_virtual:
            set_virtual_rank(self._number)

    def _announce(self, model: nn.Module, microbatch: int) -> None:
        call = self._current()
        is_first = microbatch == 0
        if call.first_val_step is not None and call.forward_only:
            is_first = is_first and call.first_val_step
        if is_first and hasattr(model, "set_is_first_microbatch"):
            model.set_is_first_microbatch()
        set_current_microbatch(model, microbatch)

    def _sent(self, output: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        prepared = _detached if self._current().forward_only else _differentiable
        outputs = tuple(prepared(tensor) for tensor in outputs)
        return (*outputs, inputs[-1]) if self._relays else outputs


def _detached(tensor: Any) -> Any:
    # Megatron-core's transformer block says requires_grad of what it makes under no_grad, too.
    return tensor.detach() if isinstance(tensor, torch.Tensor) else tensor


def _differentiable(tensor: Any) -> Any:
    # A stage whose output depends on no parameter (an encoder without images, frozen layers, a loss of nothing) gets a
    # gradient and drops it: Megatron's stages always send one back.
    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.requires_grad:
        return tensor.detach().requires_grad_()
    return tensor


def _autocast(config: StepConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if not config.enable_autocast:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=config.autocast_dtype)
