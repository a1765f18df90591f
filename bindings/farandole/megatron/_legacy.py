"""The forward-backward function of Megatron-LM before Megatron-core: it takes optimizer and timers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from farandole.megatron._calls import call_with_what_it_takes
from farandole.megatron._config import ModelParallelConfig
from farandole.megatron._refusal import refusal_of_call, refused_on_all_ranks
from farandole.megatron._schedules import get_forward_backward_func


@dataclass(frozen=True)
class LegacyForwardBackward:
    """``forward_backward_func(forward_step_func, data_iterator, model, optimizer, timers, forward_only)``.

    What Megatron-LM 2 and 3 took from their global arguments is given here.

    Args:
        get_num_microbatches: called in each step.
        seq_length, micro_batch_size, hidden_size: of what passes between stages.
        params_dtype: likewise.
        decoder_seq_length: of the decoder, where there are an encoder and a decoder.
        sequence_parallel: sequences are divided among the tensor-parallel ranks.
        variable_seq_lengths: shapes come with the tensors.
        pp_size, vp_size: as for :func:`get_forward_backward_func`.
    """

    get_num_microbatches: Callable[[], int]
    seq_length: int
    micro_batch_size: int
    hidden_size: int
    params_dtype: torch.dtype = torch.float32
    decoder_seq_length: int | None = None
    sequence_parallel: bool = False
    variable_seq_lengths: bool = False
    pp_size: int | None = None
    vp_size: int | None = None

    @property
    def pipelined(self) -> bool:
        """Whether other ranks may wait for this one."""
        return self.pp_size != 1

    @refused_on_all_ranks
    def __call__(
        self,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: nn.Module | list[nn.Module],
        optimizer: Any,
        timers: Callable[..., Any] | None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
    ) -> list[Any]:
        """One step: losses are scaled by ``optimizer.scale_loss``. Otherwise as :class:`ForwardBackward`.

        Args:
            optimizer: None where there is no scaling.
            timers: "forward-compute" and "backward-compute" are started and stopped.
        """
        with refusal_of_call(self.pipelined):
            num_microbatches = self.get_num_microbatches()
            step = get_forward_backward_func(self.pp_size, self.vp_size)
            step = step.with_config(self._config(optimizer, timers, forward_only))
        return step(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            decoder_seq_length=self.decoder_seq_length,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
        )

    def _config(self, optimizer: Any, timers: Callable[..., Any] | None, forward_only: bool) -> ModelParallelConfig:
        return ModelParallelConfig(
            hidden_size=self.hidden_size,
            pipeline_dtype=self.params_dtype,
            sequence_parallel=self.sequence_parallel,
            variable_seq_lengths=self.variable_seq_lengths,
            timers=None if timers is None else _LegacyTimers(timers),
            grad_scale_func=None if optimizer is None or forward_only else optimizer.scale_loss,
        )


class _LegacyTimers:
    """Timers whose arguments depend on their age; that of the whole step was its caller's."""

    def __init__(self, timers: Callable[..., Any]):
        self._timers = timers

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        if name == "forward-backward":
            return _NoTimer()
        if log_level is None:
            return self._timers(name)
        return call_with_what_it_takes(self._timers, name, log_level=log_level)


class _NoTimer:
    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self) -> None:
        pass
