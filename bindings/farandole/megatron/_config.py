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
    """Megatron-core 0.19's of the same name, with its defaults, and what schedules read of its TransformerConfig.

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
    moe_grad_scale_func: Callable[[], torch.Tensor] | None = None
    mtp_grad_scale_func: Callable[[], torch.Tensor] | None = None
    gradient_accumulation_fusion: bool = False
    """Layers add to ``main_grad`` themselves: for DistributedDataParallel."""
    context_parallel_size: int = 1
    """For DistributedDataParallel; elsewhere that of the groups counts."""
    # Refused in steps unless they are off.
    overlap_moe_expert_parallel_comm: bool = False
    hybrid_context_parallel: bool = False
    defer_embedding_wgrad_compute: bool = False
    delay_wgrad_compute: bool = False
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    use_ring_exchange_p2p: bool = False
    # Nothing is read of what follows: layers do so, and the other sizes are those of the groups.
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    pipeline_model_parallel_comm_backend: str | None = None
    hierarchical_context_parallel_sizes: list[int] | None = None
    max_seqlen_per_dp_cp_rank: int | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    tensor_parallel_num_weight_shards: int | None = None
    expert_tensor_parallel_num_weight_shards: int | None = None
    gtp_weight_remat_size: int = 1
    expert_gtp_weight_remat_size: int = 1
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    deterministic_mode: bool = False
    use_te_rng_tracker: bool = False
    tp_comm_overlap: bool = False
    tp_comm_bulk_wgrad: bool = True
    tp_comm_bulk_dgrad: bool = True
    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_overlap_rs_dgrad: bool = False
    tp_comm_split_ag: bool = True
    tp_comm_atomic_ag: bool = False
    tp_comm_split_rs: bool = True
    tp_comm_atomic_rs: bool = False
    tp_comm_overlap_disable_qkv: bool = False
    tp_comm_overlap_disable_fc1: bool = False
    tp_comm_bootstrap_backend: str = "nccl"
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    ep_overlap_early_attn_memory_release: bool = False
    batch_p2p_sync: bool = True
    overlap_p2p_comm_warmup_flush: bool = False
    wgrad_deferral_limit: int = 0
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False
    cpu_offloading_double_buffering: bool = False
    cpu_offloading_retain_pinned_cpu_buffers: bool = False


_DEFAULTS = {field.name: field.default for field in fields(ModelParallelConfig)}

# What the schedules would have to do something for, and do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "overlap_moe_expert_parallel_comm": (False, None),
    "hybrid_context_parallel": (False, None),
    "dynamic_context_parallel": (False, None),
    "defer_embedding_wgrad_compute": (False, None),
    "delay_wgrad_compute": (False, None),
    "overlap_dispatch_backward_with_experts_wgrad": (False, None),
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
