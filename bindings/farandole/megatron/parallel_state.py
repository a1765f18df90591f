"""Process groups of pipeline, tensor and data parallelism, for programs without Megatron-core.

The functions have the names of ``megatron.core.parallel_state``, which is used instead where it is initialized. Global
rank = tensor rank + tp * (data rank + dp * pipeline rank), as Megatron orders them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass
class _State:
    pipeline: dist.ProcessGroup
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup
    model: dist.ProcessGroup
    embedding: dist.ProcessGroup | None  # the first and last stages of a pipeline, on these
    virtual_size: int | None
    split_rank: int | None
    virtual_rank: int | None = None


_state: _State | None = None

# Megatron-core's arguments of initialize_model_parallel that are not here, with the values that change nothing.
_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "pipeline_model_parallel_comm_backend": (None,),
    "use_sharp": (False,),
    "context_parallel_size": (1,),
    "hierarchical_context_parallel_sizes": (None,),
    "hybrid_context_parallel": (False,),
    "expert_model_parallel_size": (1,),
    "gtp_remat_size": (1,),
    "expert_gtp_remat_size": (1,),
    "num_distributed_optimizer_instances": (1,),
    "expert_tensor_parallel_size": (None, 1),
    "nccl_communicator_config_path": (None,),
    "distributed_timeout_minutes": (30,),
    "order": ("tp-cp-ep-dp-pp",),
    "get_embedding_ranks": (None,),
    "get_position_embedding_ranks": (None,),
    "create_gloo_process_groups": (True, False),
    "create_all_gather_group": (False,),
    "high_priority_stream_groups": (None,),
    "sharp_enabled_group": (None,),
    "rank_offset": (0,),
    "local_world_size": (None,),
}


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_split_rank: int | None = None,
    **megatrons: Any,
) -> None:
    """Makes the groups; a collective over the world.

    Args:
        tensor_model_parallel_size: ranks that share each layer.
        pipeline_model_parallel_size: ranks that share the layers.
        virtual_pipeline_model_parallel_size: model chunks per rank; None for one.
        pipeline_model_parallel_split_rank: the first pipeline rank of the decoder, where there are an encoder and a
            decoder.
        megatrons: Megatron-core's other arguments, where they ask for nothing: sizes of 1, None, False, its ``order``.

    Raises:
        NotImplementedError: another of its arguments asks for something.
        RuntimeError: there are groups already, or no process group is initialized.
        ValueError: sizes that do not fit the world or each other.
    """
    global _state
    if _state is not None:
        raise RuntimeError("model parallelism is initialized already, expected destroy_model_parallel() before")
    if not dist.is_initialized():
        raise RuntimeError("the process group is not initialized, expected init_process_group() before")
    for name, value in megatrons.items():
        if name not in _ASKS_FOR_NOTHING:
            raise TypeError(f"initialize_model_parallel() got an unexpected keyword argument '{name}'")
        if value not in _ASKS_FOR_NOTHING[name]:
            raise NotImplementedError(
                f"{name} is {value!r}, expected {_ASKS_FOR_NOTHING[name][0]!r}: initialize megatron.core.parallel_state, "
                "which is used then, or pass pg_collection"
            )
    tp, pp, world = tensor_model_parallel_size, pipeline_model_parallel_size, dist.get_world_size()
    for name, size in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}, expected an int of at least 1")
    if world % (tp * pp) != 0:
        raise ValueError(
            f"tensor_model_parallel_size * pipeline_model_parallel_size is {tp * pp}, expected a divisor of the {world} "
            "ranks of the world"
        )
    virtual, split = virtual_pipeline_model_parallel_size, pipeline_model_parallel_split_rank
    if virtual is not None and (virtual < 1 or pp == 1):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size is {virtual} with {pp} pipeline ranks, expected at least 1, and "
            "several ranks"
        )
    if split is not None and not 0 < split < pp:
        raise ValueError(f"pipeline_model_parallel_split_rank is {split}, expected 1 to {pp - 1}")
    dp = world // (tp * pp)
    pipelines = [[t + tp * (d + dp * p) for p in range(pp)] for d in range(dp) for t in range(tp)]
    tensors = [[t + tp * (d + dp * p) for t in range(tp)] for p in range(pp) for d in range(dp)]
    replicas = [[t + tp * (d + dp * p) for d in range(dp)] for p in range(pp) for t in range(tp)]
    models = [[t + tp * (d + dp * p) for p in range(pp) for t in range(tp)] for d in range(dp)]
    groups = [dist.new_subgroups_by_enumeration(ranks)[0] for ranks in (pipelines, tensors, replicas, models)]
    embedding = None
    if pp == 2:
        embedding = groups[0]
    elif pp > 2:
        embedding = dist.new_subgroups_by_enumeration([[ranks[0], ranks[-1]] for ranks in pipelines])[0]
    _state = _State(groups[0], groups[1], groups[2], groups[3], embedding, virtual, split)


def destroy_model_parallel() -> None:
    """Forgets the groups; they end with the process group."""
    global _state
    _state = None


def model_parallel_is_initialized() -> bool:
    return _state is not None


def _get() -> _State:
    if _state is None:
        raise RuntimeError("model parallelism is not initialized, expected initialize_model_parallel() before")
    return _state


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    return _get().pipeline


def get_tensor_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    return _get().tensor


def get_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup:
    """The tensor-parallel ranks of all stages: over which a DistributedOptimizer adds up norms."""
    return _get().model


def get_data_parallel_group(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> dist.ProcessGroup:
    """One group, whatever is asked: contexts are not divided, and there is one optimizer instance."""
    return _get().data


def get_embedding_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The first and the last rank of this rank's pipeline; None on other ranks, and without a pipeline."""
    return _get().embedding


def get_position_embedding_group(check_initialized: bool = True) -> None:
    """None: position embeddings are on the first stage alone."""
    return None


def get_pipeline_model_parallel_world_size() -> int:
    return _get().pipeline.size()


def get_pipeline_model_parallel_rank() -> int:
    return _get().pipeline.rank()


def get_tensor_model_parallel_world_size() -> int:
    return _get().tensor.size()


def get_tensor_model_parallel_rank() -> int:
    return _get().tensor.rank()


def get_data_parallel_world_size(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    return _get().data.size()


def get_data_parallel_rank(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> int:
    return _get().data.rank()


def get_context_parallel_world_size() -> int:
    """1: contexts are not divided."""
    return 1


def get_context_parallel_rank() -> int:
    return 0


def get_tensor_model_parallel_src_rank() -> int:
    """Global, as those that follow: the first of the tensor-parallel ranks."""
    return dist.get_global_rank(_get().tensor, 0)


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    return dist.get_global_rank(_get().data, 0)


def get_model_parallel_src_rank() -> int:
    return dist.get_global_rank(_get().model, 0)


def get_pipeline_model_parallel_first_rank() -> int:
    return dist.get_global_rank(_get().pipeline, 0)


def get_pipeline_model_parallel_last_rank() -> int:
    return dist.get_global_rank(_get().pipeline, get_pipeline_model_parallel_world_size() - 1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Of a ring."""
    return dist.get_global_rank(_get().pipeline, (_get().pipeline.rank() + 1) % _get().pipeline.size())


def get_pipeline_model_parallel_prev_rank() -> int:
    """Of a ring."""
    return dist.get_global_rank(_get().pipeline, (_get().pipeline.rank() - 1) % _get().pipeline.size())


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return _get().virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The chunk whose forward or backward runs; None without virtual stages."""
    return _get().virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    _get().virtual_rank = rank


def get_pipeline_model_parallel_split_rank() -> int | None:
    return _get().split_rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, and unless ``ignore_virtual`` the chunk ``vp_stage``, is first.

    The default is Megatron-core's from 0.13 on. Without ``vp_stage``, which it then requires, the chunk is the one that
    runs.
    """
    return get_pipeline_model_parallel_rank() == 0 and (ignore_virtual or _chunk(vp_stage) in (None, 0))


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """As :func:`is_pipeline_first_stage`."""
    state = _get()
    if state.pipeline.rank() != state.pipeline.size() - 1:
        return False
    return ignore_virtual or state.virtual_size is None or _chunk(vp_stage) == state.virtual_size - 1


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a pipeline rank (by default this one) has stages of the encoder; True without a split."""
    state = _get()
    rank = state.pipeline.rank() if rank is None else rank
    return state.split_rank is None or rank < state.split_rank


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a pipeline rank (by default this one) has stages of the decoder; True without a split."""
    state = _get()
    rank = state.pipeline.rank() if rank is None else rank
    return state.split_rank is None or rank >= state.split_rank


def _chunk(vp_stage: int | None) -> int | None:
    return _get().virtual_rank if vp_stage is None else vp_stage
