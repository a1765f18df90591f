"""What Megatron-core's DistributedDataParallel is asked for."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

import torch

from farandole.ddp._options import is_number


@dataclass
class DistributedDataParallelConfig:
    """Megatron-core's of the same name: its fields, with its defaults.

    What belongs to FSDP, to TransformerEngine's storage and to NCCL's user buffers must keep its default; another value
    is refused by name. Megatron-core's own config serves as well, and so does any object with some of these fields.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    """No effect: the optimizer's step starts all gathers, on every stage."""
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool | float = False
    """The largest 2-norm of a parameter's gradient; True is refused: Megatron-core's own limit depends on its history."""
    bucket_size: int | None = None
    num_buckets: int | None = None
    """Instead of ``bucket_size``: that is the number of trainable parameters of the module divided by it."""
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    fp4_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    preserve_fp32_weights: bool = True
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    delay_wgrad_compute: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False

    def __post_init__(self) -> None:
        check(self)


_DEFAULTS = {field.name: field.default for field in fields(DistributedDataParallelConfig)}

_SUPPORTED = frozenset(
    {
        "grad_reduce_in_fp32",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "align_param_gather",
        "use_distributed_optimizer",
        "num_distributed_optimizer_instances",
        "check_for_nan_in_grad",
        "check_for_large_grads",
        "bucket_size",
        "num_buckets",
        "pad_buckets_for_high_nccl_busbw",
        "average_in_collective",
        "reduce_scatter_with_fp32_accumulation",
    }
)


_WHOLE = ("num_distributed_optimizer_instances", "bucket_size", "num_buckets")


def value_of(config: Any, name: str) -> Any:
    """A field, or its default where the object has none."""
    return getattr(config, name, _DEFAULTS[name])


def instances_of(config: Any) -> int:
    """How many optimizer instances there are groups for, also in a config that is to be refused on all ranks."""
    instances = value_of(config, "num_distributed_optimizer_instances")
    is_used = value_of(config, "use_distributed_optimizer") is True and isinstance(instances, int)
    return instances if is_used else 1


def check(config: Any) -> None:
    """Of any object with some of the fields.

    Raises:
        NotImplementedError: a value that is not supported; the field is named.
        TypeError: a value of another type, or no config at all.
        ValueError: values that do not fit each other.
    """
    if config is None or isinstance(config, (str, dict)):
        raise TypeError(f"ddp_config is {config!r}: expected a DistributedDataParallelConfig")
    for name, default in _DEFAULTS.items():
        value = value_of(config, name)
        if name not in _SUPPORTED and value != default:
            raise NotImplementedError(f"ddp_config.{name} is {value!r}, expected {default!r}: it is not supported")
    # Those of a later Megatron-core than this knows.
    for field in fields(config) if is_dataclass(config) else ():
        default = (
            field.default_factory() if field.default is MISSING and callable(field.default_factory) else field.default
        )
        if field.name not in _DEFAULTS and default is not MISSING and getattr(config, field.name) != default:
            raise NotImplementedError(
                f"ddp_config.{field.name} is {getattr(config, field.name)!r}, expected {default!r}: it is not known"
            )
    for name in _SUPPORTED:
        if expected := _expected_instead(name, value_of(config, name)):
            raise TypeError(f"ddp_config.{name} is {value_of(config, name)!r}, expected {expected}")
    if value_of(config, "check_for_large_grads") is True:
        raise NotImplementedError(
            "ddp_config.check_for_large_grads is True, expected False or the largest 2-norm of a parameter's gradient"
        )
    sharded = value_of(config, "use_distributed_optimizer")
    for name, needs in (
        ("overlap_param_gather", value_of(config, "overlap_param_gather")),
        ("reduce_scatter_with_fp32_accumulation", value_of(config, "reduce_scatter_with_fp32_accumulation")),
        ("num_distributed_optimizer_instances", value_of(config, "num_distributed_optimizer_instances") != 1),
    ):
        if needs and not sharded:
            raise ValueError(
                f"ddp_config.{name} is {value_of(config, name)!r}: expected use_distributed_optimizer=True with it"
            )
    if value_of(config, "num_distributed_optimizer_instances") < 1:
        raise ValueError(
            f"ddp_config.num_distributed_optimizer_instances is {config.num_distributed_optimizer_instances}, expected "
            "at least 1"
        )
    buckets, size = value_of(config, "num_buckets"), value_of(config, "bucket_size")
    if buckets is not None and (size is not None or buckets < 1):
        raise ValueError(
            f"ddp_config.num_buckets is {buckets} and bucket_size {size}: expected one of them, at least 1"
        )


def _expected_instead(name: str, value: Any) -> str:
    """Empty where the value has a type that the field can have."""
    if name in _WHOLE:
        is_whole = is_number(value) and value == int(value)
        return "" if is_whole or (value is None and _DEFAULTS[name] is None) else "a whole number"
    if name == "check_for_large_grads":
        is_norm = is_number(value) and value >= 0
        return "" if is_norm or isinstance(value, bool) else "False or the largest 2-norm of a parameter's gradient"
    return "" if isinstance(value, bool) else "True or False"
