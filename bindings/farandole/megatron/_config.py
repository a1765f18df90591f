"""What a step reads of a model's ``config``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch


class ModelType(enum.Enum):
    """Of a model's ``model_type``, where there is one. Megatron-core's of the same names serve as well."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2


@dataclass
class ModelParallelConfig:
    """What the schedules read of a model's ``config``, by Megatron-core's names and with its defaults.

    Any object with some of these attributes serves as a config; what it lacks has the value here. Megatron-core's own
    configs have them all.
    """

    hidden_size: int | None = None
    """Last dimension of what passes between stages; needed unless ``variable_seq_lengths``."""
    pipeline_dtype: torch.dtype | None = None
    """Of what passes between stages; needed unless ``variable_seq_lengths``."""
    virtual_pipeline_model_parallel_size: int | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    """Microbatches that a rank runs through one chunk before it goes on to the next; as many as ranks if None."""
    sequence_parallel: bool = False
    """Sequences are divided among the tensor-parallel ranks."""
    variable_seq_lengths: bool = False
    """Shapes come with the tensors, in every step; else they are computed and nothing is exchanged."""
    mtp_standalone: bool = False
    """As ``variable_seq_lengths``."""
    deallocate_pipeline_outputs: bool = False
    """No effect: an output that has been sent is always let go, and nothing is done to it that others could see."""
    calculate_per_token_loss: bool = False
    """Losses are sums over tokens; ``finalize_model_grads_func`` gets their number and divides."""
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    timers: Callable[..., Any] | None = None
    """``timers(name, log_level=n).start(...)`` and ``timers(name).stop()``, as Megatron's."""
    barrier_with_L1_time: bool = True  # noqa: N815
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    no_sync_func: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None
    grad_sync_func: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None
    param_sync_func: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    check_for_nan_in_loss_and_grad: bool = False
    """A loss, or a gradient that a stage gives to the one before, that is NaN or infinite fails the step on all ranks of
    the pipeline, with stage and microbatch; named as Megatron-LM's argument. Not beside a loss scale."""
    overlap_p2p_comm: bool = False
    """No effect, like ``batch_p2p_comm`` and ``overlap_p2p_comm_warmup_flush``: messages always overlap compute."""
    batch_p2p_comm: bool = True
    num_moe_experts: int | None = None
    mtp_num_layers: int | None = None


_DEFAULTS = {field.name: field.default for field in fields(ModelParallelConfig)}

# What the schedules would have to do something for, and do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "overlap_moe_expert_parallel_comm": (False, None),
    "hybrid_context_parallel": (False, None),
    "dynamic_context_parallel": (False, None),
    "defer_embedding_wgrad_compute": (False, None),
    "delay_wgrad_compute": (False, None),
    "fine_grained_activation_offloading": (False, None),
    "moe_paged_stash": (False, None),
    "use_ring_exchange_p2p": (False, None),
}


class StepConfig:
    """A config as the schedules see it: with defaults for what it lacks.

    Raises:
        NotImplementedError: it asks for something that is not supported; it is named.
        TypeError: its timers are none.
    """

    def __init__(self, config: Any):
        for name, off in _UNSUPPORTED.items():
            value = getattr(config, name, off[0])
            if value not in off:
                raise NotImplementedError(f"config.{name} is {value!r}, expected {off[0]!r}: it is not supported")
        if getattr(config, "cuda_graph_impl", "none") == "local":
            raise NotImplementedError("config.cuda_graph_impl is 'local', expected 'none': it is not supported")
        timers = getattr(config, "timers", None)
        if timers is not None and not callable(timers):  # others may wait in a barrier of theirs
            raise TypeError(
                f"config.timers is a {type(timers).__name__}, expected a callable: timers(name, log_level=n)"
            )
        self.source = config

    def __getattr__(self, name: str) -> Any:
        if name not in _DEFAULTS:
            raise AttributeError(name)
        return getattr(self.source, name, _DEFAULTS[name])
